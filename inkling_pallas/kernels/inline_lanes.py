"""Mosaic code per CUDA thread for tiles of tensor memory: what `lanes` inlines into a kernel.

In its native layout a thread holds a whole row, in vectors of two elements.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from inkling_pallas.kernels.inline import THREADS, i32, plain_pointer

_EIGHT = 8  # 16-bit elements of 16 bytes


def load_rows(ref: Any, phase: Any, *, rows: int, group: int, tokens: int, width: int) -> Any:
    """Returns [128, width] of a block of the sheared layout; see `lanes.load_rows`."""
    memref, base = ir.MemRefType(ref.type), utils.memref_ptr(ref)
    element, phase = memref.element_type, phase.registers.item()
    row = arith.minui(_row(), i32(rows - 1))
    last, own = (
        arith.shrui(arith.addi(phase, token), i32(3)) for token in (i32(tokens - 1), arith.divui(row, i32(group)))
    )
    start = arith.muli(arith.subi(last, own), i32(_EIGHT))
    start = arith.addi(arith.muli(row, i32(memref.shape[-1])), start)
    splat = fragmented_array.FragmentedArray.splat(
        utils.c(0.0, element), (THREADS, width), fragmented_array.TMEM_NATIVE_LAYOUT
    )
    registers = np.array(splat.registers, dtype=object, copy=True)
    pairs = dict(_pairs(registers))
    for first in range(0, width, _EIGHT):
        pointer = utils.getelementptr(base, [arith.addi(start, i32(first))], element)
        loaded = llvm.load(ir.VectorType.get((_EIGHT,), element), pointer, alignment=16)
        for i in range(0, _EIGHT, 2):
            registers[pairs[(first + i) // 2]] = vector.extract_strided_slice(
                ir.VectorType.get((2,), element), loaded, [i], [2], [1]
            )
    return fragmented_array.FragmentedArray(_registers=registers, _layout=splat.layout, _is_signed=None)


def store_rows(ref: Any, rows: Any, x: Any, *, column: int) -> None:
    """Writes ref[rows[r], column:] = x[r] where rows are not negative, 16 bytes at a time."""
    base, memref = utils.memref_ptr(ref), ir.MemRefType(ref.type)
    element, together = memref.element_type, 128 // utils.bitwidth(memref.element_type)
    values = [x.registers[index] for _, index in sorted(_pairs(x.registers))]
    row = rows.registers.item()
    row = vector.extract(row, [], [0]) if isinstance(row.type, ir.VectorType) else row
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, row, i32(0)))
    with ir.InsertionPoint(branch.then_block):
        start = plain_pointer(ref, base, row, i32(column), memref.shape[-1])
        for first in range(0, 2 * len(values), together):
            vectors = values[first // 2 : (first + together) // 2]
            pointer = utils.getelementptr(start, [first], element)
            llvm.store(_join(vectors, element), pointer, alignment=16)
        scf.yield_([])


def any_below_one(x: Any) -> Any:
    """Returns int32 1 if some row of this warp has x < 1, else 0."""
    value = x.registers.item()
    value = vector.extract(value, [], [0]) if isinstance(value.type, ir.VectorType) else value
    code = "{ .reg .pred p, q; setp.lt.f32 p, $1, 0f3f800000; vote.sync.any.pred q, p, -1; selp.s32 $0, 1, 0, q; }"
    word = llvm.inline_asm(ir.IntegerType.get_signless(32), [value], code, "=r,f", has_side_effects=True)
    return fragmented_array.FragmentedArray.splat(word, (), is_signed=True)


def _row() -> Any:
    return arith.remui(utils.thread_idx(), i32(THREADS))


def _pairs(registers: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields (which pair of columns, index) of each register."""
    if registers.size != registers.shape[1]:
        raise AssertionError(f"the array must have 128 rows in the native layout; got registers {registers.shape}.")
    for index in np.ndindex(registers.shape):
        yield index[1], index


def _join(vectors: list[Any], element: Any) -> Any:
    pairs = 2 * len(vectors)
    joined = llvm.mlir_undef(ir.VectorType.get((pairs,), element))
    for i, pair in enumerate(vectors):
        joined = vector.insert_strided_slice(pair, joined, [2 * i], [1])
    return joined
