"""Mosaic code per CUDA thread for tiles whose rows are query rows: what `mosaic.wgmma_rows` inlines into a kernel.

In the WGMMA layout of 64 rows a thread has two rows, 8 apart, and of each block of 8 columns two neighbouring
elements; the four lanes of a quad share a row.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from inkling_pallas.kernels.mosaic.ptx.warpgroup import LANES, THREADS, i32, plain_pointer


def _quad_lane() -> Any:
    return arith.remui(utils.thread_idx(), i32(4))


def _row_in_eight() -> Any:
    return arith.divui(arith.remui(utils.thread_idx(), i32(LANES)), i32(4))


def _first_row() -> Any:
    warp = arith.remui(arith.divui(utils.thread_idx(), i32(LANES)), i32(THREADS // LANES))
    return arith.addi(arith.muli(warp, i32(16)), _row_in_eight())


def _places(registers: Any) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yields (index, block of 8 columns, which of the thread's two rows) of each register."""
    halves = [axis for axis in range(2, registers.ndim) if registers.shape[axis] == 2]
    if len(halves) != 1 or registers.shape[0] != 1:
        raise AssertionError(f"the array must have 64 rows in the WGMMA layout; got registers {registers.shape}.")
    for index in np.ndindex(registers.shape):
        yield index, index[1], index[halves[0]]


def _per_row(x: Any) -> list[Any]:
    """Returns the two scalars that a thread holds of an array in the reduced layout."""
    scalars = [vector.extract(v, [], [0]) if isinstance(v.type, ir.VectorType) else v for v in x.registers.flat]
    if len(scalars) != 2:
        raise AssertionError(f"the array must have 64 rows in the reduced WGMMA layout; got {len(scalars)} registers.")
    return scalars


def _empty(shape: tuple[int, int], element: Any) -> tuple[Any, Any]:
    """Returns an array of registers to be filled, and their layout."""
    zero = fragmented_array.FragmentedArray.splat(utils.c(0.0, element), shape, fragmented_array.WGMMA_LAYOUT)
    return np.array(zero.registers, dtype=object, copy=True), zero.layout


def _wrap(registers: Any, layout: Any) -> Any:
    return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def load(ref: Any, *, rows: int, width: int) -> Any:
    """Returns the beginnings of rows of plain 16-bit SMEM, the last of `rows` repeated."""
    memref, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
    element = memref.element_type
    registers, layout = _empty((64, width), element)
    starts = []
    for half in (0, 1):
        row = arith.minui(arith.addi(_first_row(), i32(8 * half)), i32(rows - 1))
        starts.append(arith.addi(arith.muli(row, i32(memref.shape[-1])), arith.muli(_quad_lane(), i32(2))))
    for index, block, half in _places(registers):
        place = arith.addi(starts[half], i32(8 * block))
        registers[index] = llvm.load(ir.VectorType.get((2,), element), utils.getelementptr(base, [place], element))
    return _wrap(registers, layout)


def gather_descending(ref: Any, starts: Any, *, shape: tuple[int, int]) -> Any:
    """Returns ref.flat[starts[r] - k] for element (r, k): one address a row, constant offsets from it."""
    base, element = utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type
    registers, layout = _empty(shape, element)
    first_column = arith.muli(_quad_lane(), i32(2))
    origins = [arith.subi(start, first_column) for start in _per_row(starts)]
    addresses = [utils.getelementptr(base, [origin], element) for origin in origins]
    for index, block, half in _places(registers):
        pair = llvm.mlir_undef(ir.VectorType.get((2,), element))
        for i in (0, 1):
            place = utils.getelementptr(addresses[half], [-8 * block - i], element)
            pair = vector.insert(llvm.load(element, place), pair, [], [i])
        registers[index] = pair
    return _wrap(registers, layout)


def mask(scores: Any, limit: Any, *, before: bool) -> Any:
    """Returns scores with -inf where not (key < limit), or not (key >= limit): one compare and one select each."""
    word = ir.F32Type.get()
    nothing = arith.constant(word, ir.FloatAttr.get(word, float("-inf")))
    first_column = arith.muli(_quad_lane(), i32(2))
    limits = [arith.subi(x, first_column) for x in _per_row(limit)]
    keeps = arith.CmpIPredicate.slt if before else arith.CmpIPredicate.sge
    registers = np.array(scores.registers, dtype=object, copy=True)
    for index, block, half in _places(registers):
        pair = registers[index]
        for i in (0, 1):
            kept = arith.cmpi(keeps, i32(8 * block + i), limits[half])
            value = arith.select(kept, vector.extract(pair, [], [i]), nothing)
            pair = vector.insert(value, pair, [], [i])
        registers[index] = pair
    return _wrap(registers, scores.layout)


def drop_chunks(scores: Any, absent: Any, *, chunk: int, value: float) -> Any:
    """Returns scores with `value` at chunks of keys whose bit is set: one test for each block of 8 columns."""
    kind = scores.registers.flat[0].type
    nothing = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, value)))
    registers = np.array(scores.registers, dtype=object, copy=True)
    for index, block, _ in _places(registers):
        bit = arith.andi(absent.registers.item(), i32(1 << 8 * block // chunk))
        registers[index] = arith.select(arith.cmpi(arith.CmpIPredicate.eq, bit, i32(0)), registers[index], nothing)
    return _wrap(registers, scores.layout)


def scatter(ref: Any, rows: Any, x: Any) -> None:
    """Writes ref[rows[r]] = x[r] where rows are not negative: one address a row, constant offsets from it.

    A quad holds 16 bytes of a 16-bit row in each block of 8 columns, 4 bytes a lane; it exchanges them so that each
    lane stores 16 bytes.
    """
    base, pitch = utils.memref_ptr(ref), ir.MemRefType(ref.type).shape[-1]
    element, lane = ir.MemRefType(ref.type).element_type, _quad_lane()
    narrow = utils.bitwidth(element) == 16
    first, step = (8, 32) if narrow else (2, 8)  # columns between the lanes of a quad, and between a lane's stores
    for half, row in enumerate(_per_row(rows)):
        blocks = {block: x.registers[index] for index, block, where in _places(x.registers) if where == half}
        values = [blocks[block] for block in range(len(blocks))]
        if narrow:
            values = [_transpose_quad(values[i : i + 4], lane) for i in range(0, len(values), 4)]
        branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, row, i32(0)))
        with ir.InsertionPoint(branch.then_block):
            start = plain_pointer(ref, base, row, arith.muli(lane, i32(first)), pitch)
            for i, value in enumerate(values):
                llvm.store(value, utils.getelementptr(start, [i * step], element))
            scf.yield_([])


def _transpose_quad(registers: list[Any], lane: Any) -> Any:
    """Returns, in lane q of a quad, register q of its lanes 0 to 3, as one vector of four words."""
    word = ir.IntegerType.get_signless(32)
    words = [llvm.bitcast(word, register) for register in registers]
    for step in (1, 2):
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, i32(step)), i32(0))
        for i in (i for i in range(4) if not i & step):
            low, high = words[i], words[i | step]
            received = _shuffle_xor(arith.select(upper, low, high), step)
            words[i], words[i | step] = arith.select(upper, received, low), arith.select(upper, high, received)
    together = llvm.mlir_undef(ir.VectorType.get((4,), word))
    for i, value in enumerate(words):
        together = vector.insert(value, together, [], [i])
    return together


def _shuffle_xor(value: Any, mask: int) -> Any:
    code = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [value], code, "=r,r", has_side_effects=True)


def fence_async_proxy() -> None:
    """Orders a thread's generic accesses of shared memory before later ones of the copy engine."""
    llvm.inline_asm(None, [], "fence.proxy.async.shared::cta;", "~{memory}", has_side_effects=True)


def stay_before(x: Any) -> None:
    """Branches on x < 0, which must not be: ptxas moves no arithmetic that x needs below that, and no wait above it."""
    code = "{ .reg .pred p, q; setp.lt.f32 p, $0, 0f00000000; vote.sync.any.pred q, p, -1; @q trap; }"
    sum_of_rows = functools.reduce(arith.addf, _per_row(x))
    llvm.inline_asm(None, [sum_of_rows], code, "f,~{memory}", has_side_effects=True)


def any_below_one(x: Any) -> Any:
    """Returns int32 1 if some row of this warp has x < 1, else 0."""
    code = "{ .reg .pred p, q; setp.lt.f32 p, $1, 0f3f800000; vote.sync.any.pred q, p, -1; selp.s32 $0, 1, 0, q; }"
    least = functools.reduce(arith.minimumf, _per_row(x))
    word = llvm.inline_asm(ir.IntegerType.get_signless(32), [least], code, "=r,f", has_side_effects=True)
    return fragmented_array.FragmentedArray.splat(word, (), is_signed=True)


def named_barrier(barrier: Any, *, action: str) -> None:
    """Arrives or waits at a hardware barrier of two warpgroups."""
    code = f"bar.{action} $0, {2 * THREADS};"
    llvm.inline_asm(None, [barrier.registers.item()], code, "r,~{memory}", has_side_effects=True)
