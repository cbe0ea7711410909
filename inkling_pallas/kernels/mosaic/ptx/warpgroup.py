"""Mosaic code that runs per CUDA thread: what `mosaic` inlines into a kernel. On the card only.

Addresses in global memory are 64-bit, so that no array is too long. Arrays come as fragments: NumPy arrays of
registers, each a vector.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

Vectors = Literal["separate", "neighbours", "shared"]
THREADS = 128  # of a warpgroup, which Pallas calls a thread
LANES = 32


def gather(ref: Any, rows: Any, columns: Any, *, vectors: Vectors) -> Any:
    """Returns ref[rows, columns]; ref's leading axes count as one."""
    base, memref = utils.memref_ptr(ref), ir.MemRefType(ref.type)
    registers = np.empty(rows.registers.shape, dtype=object)
    for index in np.ndindex(registers.shape):
        row, column = rows.registers[index], columns.registers[index]
        kind = ir.VectorType.get(ir.VectorType(row.type).shape, memref.element_type)
        lanes = range(math.prod(kind.shape) if vectors == "separate" else 1)
        pointers = [plain_pointer(ref, base, _lane(row, i), _lane(column, i), memref.shape[-1]) for i in lanes]
        registers[index] = _load_vector(kind, pointers, shared=vectors == "shared")
    signed = True if isinstance(memref.element_type, ir.IntegerType) else None
    return fragmented_array.FragmentedArray(_registers=registers, _layout=rows.layout, _is_signed=signed)


def gather_descending(ref: Any, starts: Any, *, shape: tuple[int, int]) -> Any:
    """Returns ref.flat[starts[c] - k] for element (k, c) in the WGMMA layout.

    One address a column, constant offsets from it.
    """
    base, element = utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type
    kind, first = ir.VectorType.get((2,), element), first_wgmma_row()
    zero = fragmented_array.FragmentedArray.splat(utils.c(0.0, element), shape, fragmented_array.WGMMA_LAYOUT)
    registers = np.array(zero.registers, dtype=object, copy=True)
    columns = [
        [utils.getelementptr(base, [arith.subi(_lane(pair, i), first)], element) for i in (0, 1)]
        for pair in starts.registers.flat
    ]
    for index, (column, rows) in wgmma_places(registers):
        pointers = [utils.getelementptr(start, [-8 * rows], element) for start in columns[column]]
        registers[index] = _load_vector(kind, pointers, shared=False)
    return fragmented_array.FragmentedArray(_registers=registers, _layout=zero.layout, _is_signed=None)


def scatter(ref: Any, rows: Any, columns: Any, x: Any, *, vectors: Vectors, swizzled: bool) -> None:
    """Writes ref[rows, columns] = x where rows are not negative."""
    base, pitch = utils.memref_ptr(ref), ir.MemRefType(ref.type).shape[-1]
    tiles_across = (
        ir.MemRefType(ref.type).shape[1] if swizzled else 0
    )  # The tiled type is [row tiles, column tiles, 8, 64].
    for row, column, value in zip(rows.registers.flat, columns.registers.flat, x.registers.flat, strict=True):
        for i in range(math.prod(ir.VectorType(value.type).shape) if vectors == "separate" else 1):
            place = _lane(row, i), _lane(column, i)
            pointer = (
                _swizzled_pointer(ref, base, *place, tiles_across)
                if swizzled
                else plain_pointer(ref, base, *place, pitch)
            )
            _store_if(place[0], _lane(value, i) if vectors == "separate" else value, pointer)


def scatter_columns(ref: Any, rows: Any, x: Any) -> None:
    """Writes ref[rows[c]] = x[:, c] where rows are not negative: one address a column, constant offsets from it."""
    base, pitch, first = utils.memref_ptr(ref), ir.MemRefType(ref.type).shape[-1], first_wgmma_row()
    places = list(wgmma_places(x.registers))
    for column, pair in enumerate(rows.registers.flat):
        mine = [(index, block) for index, (where, block) in places if where == column]
        for i in (0, 1):
            row = _lane(pair, i)
            branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, row, i32(0)))
            with ir.InsertionPoint(branch.then_block):
                start = plain_pointer(ref, base, row, first, pitch)
                for index, block in mine:
                    value = _lane(x.registers[index], i)
                    llvm.store(value, utils.getelementptr(start, [8 * block], value.type))
                scf.yield_([])


def store_transposed(ref: Any, x: Any) -> None:
    """Writes the transpose of a 16-bit WGMMA array over a swizzled operand, 2 or 4 blocks of 8 x 8 at a time."""
    base, tiles_across = utils.memref_ptr(ref), x.shape[0] // 64
    blocks = sorted(
        ((*place, x.registers[index]) for index, place in wgmma_places(x.registers)), key=lambda block: block[:2]
    )
    together = 4 if len(blocks) % 4 == 0 else 2
    for first in range(0, len(blocks), together):
        _store_blocks(ref, base, blocks[first : first + together], tiles_across)


def clear_rows_outside(ref: Any, begin: Any, end: Any, *, shape: tuple[int, int]) -> None:
    """Writes zeros over the rows of a swizzled operand that are not in [begin, end), 16 bytes a thread."""
    base, kind = utils.memref_ptr(ref), ir.VectorType.get((8,), ir.MemRefType(ref.type).element_type)
    threads_per_row = shape[1] // 8
    thread = arith.remui(utils.thread_idx(), i32(THREADS))
    first, column = arith.divui(thread, i32(threads_per_row)), arith.remui(thread, i32(threads_per_row))
    zeros = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, 0.0)))
    loop = scf.ForOp(first, i32(shape[0]), i32(THREADS // threads_per_row))
    with ir.InsertionPoint(loop.body):
        row = loop.induction_variable
        before = arith.cmpi(arith.CmpIPredicate.slt, row, begin.registers.item())
        after = arith.cmpi(arith.CmpIPredicate.sge, row, end.registers.item())
        pointer = _swizzled_pointer(ref, base, row, arith.muli(column, i32(8)), shape[1] // 64)
        _store_if(arith.select(arith.ori(before, after), i32(0), i32(-1)), zeros, pointer)
        scf.yield_([])


def i32(value: int) -> Any:
    """Returns a constant."""
    return utils.c(value, ir.IntegerType.get_signless(32))


def _lane(register: Any, index: int) -> Any:
    return vector.extract(register, [], [index]) if isinstance(register.type, ir.VectorType) else register


def plain_pointer(ref: Any, base: Any, row: Any, column: Any, pitch: int) -> Any:
    """Returns the address of an element of a plain ref; the offset is 64-bit in global memory."""
    element = ir.MemRefType(ref.type).element_type
    if utils.is_smem_ref(ref):
        return utils.getelementptr(base, [arith.addi(arith.muli(row, i32(pitch)), column)], element)
    i64 = ir.IntegerType.get_signless(64)
    offset = arith.addi(arith.muli(arith.extsi(i64, row), utils.c(pitch, i64)), arith.extsi(i64, column))
    return utils.getelementptr(base, [offset], element)


def _swizzled_pointer(ref: Any, base: Any, row: Any, column: Any, tiles_across: int) -> Any:
    tile = arith.addi(arith.muli(arith.shrui(row, i32(3)), i32(tiles_across)), arith.shrui(column, i32(6)))
    row_in_tile = arith.andi(row, i32(7))
    chunk = arith.xori(arith.andi(arith.shrui(column, i32(3)), i32(7)), row_in_tile)
    offset = arith.addi(arith.muli(tile, i32(512)), arith.muli(row_in_tile, i32(64)))
    offset = arith.addi(offset, arith.addi(arith.muli(chunk, i32(8)), arith.andi(column, i32(7))))
    return utils.getelementptr(base, [offset], ir.MemRefType(ref.type).element_type)


def wgmma_places(registers: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
    """Yields (index, (block of 8 columns, the thread's row in eights)) of each register in the WGMMA layout.

    A thread's first row is `first_wgmma_row`; its others are 8 further, then 64 and 72, and so on.
    """
    halves = [axis for axis in range(2, registers.ndim) if registers.shape[axis] == 2]
    if len(halves) != 1:
        raise AssertionError(
            f"the WGMMA layout must have one axis of two row halves; got registers of shape {registers.shape}."
        )
    for index in np.ndindex(registers.shape):
        yield index, (index[1], 8 * index[0] + index[halves[0]])


def warp_in_group() -> Any:
    """Returns which warp of its warpgroup a thread is in."""
    return arith.remui(arith.divui(utils.thread_idx(), i32(LANES)), i32(THREADS // LANES))


def lane_in_warp() -> Any:
    """Returns which lane of its warp a thread is."""
    return arith.remui(utils.thread_idx(), i32(LANES))


def first_wgmma_row() -> Any:
    """Returns a thread's first row of an array in the WGMMA layout."""
    lane = lane_in_warp()
    return arith.addi(arith.muli(warp_in_group(), i32(16)), arith.shrui(lane, i32(2)))


def _store_blocks(ref: Any, base: Any, blocks: list[tuple[int, int, Any]], tiles_across: int) -> None:
    """Stores 2 or 4 blocks, transposed: lane l gives the address of row l % 8 of block l // 8."""
    lane = lane_in_warp()
    mine = arith.andi(arith.shrui(lane, i32(3)), i32(len(blocks) - 1))
    place = [pick(mine, [block[i] for block in blocks]) for i in (0, 1)]
    row = arith.addi(arith.muli(place[0], i32(8)), arith.andi(lane, i32(7)))
    column = arith.addi(arith.muli(place[1], i32(8)), arith.muli(warp_in_group(), i32(16)))
    pointer = _swizzled_pointer(ref, base, row, column, tiles_across)
    word = ir.IntegerType.get_signless(32)
    words = [llvm.bitcast(word, register) for _, _, register in blocks]
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    code = f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [$0], {{{names}}};"
    constraints = ",".join(["r"] * (len(words) + 1)) + ",~{memory}"
    llvm.inline_asm(None, [shared_address(pointer), *words], code, constraints, has_side_effects=True)


def pick(index: Any, values: list[int]) -> Any:
    """Returns values[index] for a traced index."""
    result = i32(values[0])
    for i, value in enumerate(values[1:], 1):
        result = arith.select(arith.cmpi(arith.CmpIPredicate.eq, index, i32(i)), i32(value), result)
    return result


def shared_address(pointer: Any) -> Any:
    """Returns the 32-bit address of a place in shared memory."""
    shared = llvm.PointerType.get(3)
    if pointer.type != shared:
        pointer = llvm.addrspacecast(shared, pointer)
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)


def _load_vector(kind: Any, pointers: list[Any], *, shared: bool) -> Any:
    if shared:
        return vector.broadcast(kind, llvm.load(kind.element_type, pointers[0]))
    if len(pointers) == 1:
        return llvm.load(kind, pointers[0])
    result = llvm.mlir_undef(kind)
    for i, pointer in enumerate(pointers):
        result = vector.insert(llvm.load(kind.element_type, pointer), result, [], [i])
    return result


def _store_if(row: Any, value: Any, pointer: Any) -> None:
    """Stores where the row is not negative."""
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, row, i32(0)))
    with ir.InsertionPoint(branch.then_block):
        llvm.store(value, pointer)
        scf.yield_([])
