"""Mosaic code per CUDA thread for tiles of the sheared layout: what `mosaic.sheared_loads` inlines into a kernel.

The warp reads blocks of 8 x 8 elements, 2 or 4 by one instruction: each lane gives the address of one row of 16 bytes
and receives two elements of each block, as the WGMMA layout has them.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from inkling_pallas.kernels.mosaic.ptx.warpgroup import i32, lane_in_warp, pick, shared_address, warp_in_group

_EIGHT = 8


def load_rows(ref: Any, phase: Any, *, rows: int, group: int, tokens: int, width: int) -> Any:
    """Returns [64, width] in the WGMMA layout; see `mosaic.sheared_loads.load_rows`."""
    registers, layout, halves = _empty(ref, (64, width))
    lane = lane_in_warp()
    upper, right = (arith.andi(arith.shrui(lane, i32(bit)), i32(1)) for bit in (3, 4))
    row = arith.addi(arith.muli(warp_in_group(), i32(16)), arith.addi(_in_eight(lane), arith.muli(upper, i32(_EIGHT))))
    start = row_start(ref, phase, row, rows, group, tokens)
    start = arith.addi(start, arith.muli(right, i32(_EIGHT)))
    places = {(index[1], index[halves]): index for index in np.ndindex(registers.shape)}
    for pair in range(0, width // _EIGHT, 2):
        loaded = _load_blocks(ref, arith.addi(start, i32(_EIGHT * pair)), 4, transposed=False)
        for i, register in enumerate(loaded):
            registers[places[pair + i // 2, i % 2]] = register
    return _wrap(registers, layout)


def load_columns(ref: Any, phase: Any, *, rows: int, group: int, tokens: int, shape: tuple[int, int]) -> Any:
    """Returns [keys, columns] in the WGMMA layout; see `mosaic.sheared_loads.load_columns`."""
    registers, layout, halves = _empty(ref, shape)
    # Block of 8 columns, and the keys of a warp's block in eights.
    blocks: list[Any] = sorted((index[1], 8 * index[0] + index[halves], index) for index in np.ndindex(registers.shape))
    together = 4 if len(blocks) % 4 == 0 else 2
    lane = lane_in_warp()
    mine = arith.andi(arith.shrui(lane, i32(3)), i32(together - 1))
    for first in range(0, len(blocks), together):
        some = blocks[first : first + together]
        block, eight = (pick(mine, [entry[i] for entry in some]) for i in (0, 1))
        column = arith.addi(arith.muli(block, i32(_EIGHT)), _in_eight(lane))
        key = arith.addi(arith.muli(eight, i32(_EIGHT)), arith.muli(warp_in_group(), i32(16)))
        start = arith.addi(row_start(ref, phase, column, rows, group, tokens), key)
        loaded = _load_blocks(ref, start, together, transposed=True)
        for (_, _, index), register in zip(some, loaded, strict=True):
            registers[index] = register
    return _wrap(registers, layout)


def _in_eight(lane: Any) -> Any:
    return arith.andi(lane, i32(_EIGHT - 1))


def _empty(ref: Any, shape: tuple[int, int]) -> tuple[Any, Any, int]:
    """Returns an array of registers to be filled, their layout, and the axis of a thread's two rows of 16."""
    zero = utils.c(0.0, ir.MemRefType(ref.type).element_type)
    splat = fragmented_array.FragmentedArray.splat(zero, shape, fragmented_array.WGMMA_LAYOUT)
    halves = [axis for axis in range(2, splat.registers.ndim) if splat.registers.shape[axis] == 2]
    if len(halves) != 1:
        shape_found = splat.registers.shape
        raise AssertionError(f"the WGMMA layout must have one axis of two row halves; got registers {shape_found}.")
    return np.array(splat.registers, dtype=object, copy=True), splat.layout, halves[0]


def _wrap(registers: Any, layout: Any) -> Any:
    return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def row_start(ref: Any, phase: Any, row: Any, rows: int, group: int, tokens: int) -> Any:
    """Returns where the keys of a tile start in a row of the block: a step of 8 for each start that comes later."""
    row = arith.minui(row, i32(rows - 1))
    phase = phase.registers.item()
    last, own = (
        arith.shrui(arith.addi(phase, token), i32(3)) for token in (i32(tokens - 1), arith.divui(row, i32(group)))
    )
    step = arith.muli(arith.subi(last, own), i32(_EIGHT))
    return arith.addi(arith.muli(row, i32(ir.MemRefType(ref.type).shape[-1])), step)


def _load_blocks(ref: Any, place: Any, count: int, *, transposed: bool) -> list[Any]:
    """Returns what this lane receives of 2 or 4 blocks, two elements each; lane l gives row l % 8 of block l // 8."""
    element, word = ir.MemRefType(ref.type).element_type, ir.IntegerType.get_signless(32)
    address = shared_address(utils.getelementptr(utils.memref_ptr(ref), [place], element))
    names = ", ".join(f"${i}" for i in range(count))
    trans = ".trans" if transposed else ""
    code = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [${count}];"
    kind = llvm.StructType.get_literal([word] * count)
    constraints = ",".join(["=r"] * count) + ",r,~{memory}"
    words = llvm.inline_asm(kind, [address], code, constraints, has_side_effects=True)
    pair = ir.VectorType.get((2,), element)
    return [llvm.bitcast(pair, llvm.extractvalue(word, words, [i])) for i in range(count)]
