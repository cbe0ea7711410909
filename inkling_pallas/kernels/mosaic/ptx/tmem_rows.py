"""Mosaic code per CUDA thread for tiles of tensor memory: what `mosaic.tmem_rows` inlines into a kernel.

In its native layout a thread holds a whole row, in vectors of two elements.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from inkling_pallas.kernels.mosaic.ptx import sheared_loads as ptx_loads
from inkling_pallas.kernels.mosaic.ptx.warpgroup import THREADS, i32, plain_pointer

_EIGHT = 8  # 16-bit elements of 16 bytes


def load_rows(ref: Any, phase: Any, *, rows: int, group: int, tokens: int, width: int) -> Any:
    """Returns [128, width] of a block of the sheared layout; see `mosaic.tmem_rows.load_rows`."""
    memref, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
    element, row = memref.element_type, arith.remui(utils.thread_idx(), i32(THREADS))
    start = ptx_loads.row_start(ref, phase, row, rows, group, tokens)
    splat = fragmented_array.FragmentedArray.splat(
        utils.c(0.0, element), (THREADS, width), fragmented_array.TMEM_NATIVE_LAYOUT
    )
    registers = np.array(splat.registers, dtype=object, copy=True)
    places = dict(_pairs(registers))
    word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), element)
    for first in range(0, width, _EIGHT):
        pointer = utils.getelementptr(base, [arith.addi(start, i32(first))], element)
        words = llvm.load(ir.VectorType.get((4,), word), pointer, alignment=16)
        for i in range(4):
            registers[places[first // 2 + i]] = llvm.bitcast(pair, vector.extract(words, [], [i]))
    return fragmented_array.FragmentedArray(_registers=registers, _layout=splat.layout, _is_signed=None)


def scatter(ref: Any, rows: Any, x: Any, *, column: int) -> None:
    """Writes ref[rows[r], column:] = x[r] where rows are not negative, 16 bytes at a time."""
    base, pitch = utils.memref_ptr(ref), ir.MemRefType(ref.type).shape[-1]
    words = [word for _, index in sorted(_pairs(x.registers)) for word in _words(x.registers[index])]
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, _scalar(rows), i32(0)))
    with ir.InsertionPoint(branch.then_block):
        start = plain_pointer(ref, base, _scalar(rows), i32(column), pitch)
        for first in range(0, len(words), 4):
            four = llvm.mlir_undef(ir.VectorType.get((4,), words[0].type))
            for i, word in enumerate(words[first : first + 4]):
                four = vector.insert(word, four, [], [i])
            llvm.store(four, utils.getelementptr(start, [first], words[0].type), alignment=16)
        scf.yield_([])


def wait_for_loads() -> None:
    """Waits until this warp's loads from tensor memory are complete."""
    llvm.inline_asm(None, [], "tcgen05.wait::ld.sync.aligned;", "~{memory}", has_side_effects=True)


def any_below_one(x: Any) -> Any:
    """Returns int32 1 if some row of this warp has x < 1, else 0."""
    code = "{ .reg .pred p, q; setp.lt.f32 p, $1, 0f3f800000; vote.sync.any.pred q, p, -1; selp.s32 $0, 1, 0, q; }"
    word = llvm.inline_asm(ir.IntegerType.get_signless(32), [_scalar(x)], code, "=r,f", has_side_effects=True)
    return fragmented_array.FragmentedArray.splat(word, (), is_signed=True)


def _pairs(registers: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields (which pair of columns, index) of each register."""
    if registers.size != registers.shape[1]:
        raise AssertionError(f"the array must have 128 rows in the native layout; got registers {registers.shape}.")
    for index in np.ndindex(registers.shape):
        yield index[1], index


def _scalar(x: Any) -> Any:
    """Returns what a thread holds of an array in the reduced layout."""
    value = x.registers.item()
    return vector.extract(value, [], [0]) if isinstance(value.type, ir.VectorType) else value


def _words(pair: Any) -> list[Any]:
    """Returns a register of two elements as int32 words."""
    word = ir.IntegerType.get_signless(32)
    if utils.bitwidth(ir.VectorType(pair.type).element_type) == 16:
        return [llvm.bitcast(word, pair)]
    return [llvm.bitcast(word, vector.extract(pair, [], [i])) for i in (0, 1)]
