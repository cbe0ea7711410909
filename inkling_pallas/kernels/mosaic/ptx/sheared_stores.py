"""Mosaic code per CUDA thread that writes tiles of a sheared table: what `tile_rows` inlines into a kernel.

A tile is 16 rows, one after the other. Constant offsets stand in the instructions: a thread keeps few addresses.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from inkling_pallas.kernels.mosaic.ptx.warpgroup import LANES, THREADS, i32, lane_in_warp, shared_address, warp_in_group

_EIGHT = 8  # rows and columns of a matrix that a warp loads or stores
ROWS = 16  # of a tile: those of a warp's product
_WARPS = THREADS // LANES


def write_products(out: Any, proj: Any, queries: Any, offset: Any, *scalars: Any, tokens: int, heads: int) -> None:
    """Writes the products of 16 rows with the projection of their token; see `tile_rows.write_products`.

    The warps share out the columns, 16 at a time.
    """
    width, element = _row_length(out), ir.MemRefType(out.type).element_type
    lane, shifts = lane_in_warp(), [x.registers.item() for x in scalars[:tokens]]
    halves = [arith.addi(_held_row(lane), i32(_EIGHT * half)) for half in (0, 1)]
    ordinals = [_ordinal(offset, row, heads) for row in halves]
    taus = [_own(ordinal, [x.registers.item() for x in scalars[tokens:]]) for ordinal in ordinals]
    loaded = _load_four(_address(queries, _element_of_query(lane)), 0)
    sources = [
        (_live_rows(loaded, ordinals, token, shift), _address(proj, _element_of_projection(proj, shift, lane)))
        for token, shift in enumerate(shifts)
    ]
    target = _address(out, _element_of_result(width, lane))
    blocks, pair = width // _EIGHT, arith.muli(warp_in_group(), i32(2))
    for first in range(0, blocks, 2 * _WARPS):
        # Past the last pair of blocks warps write that again, the same numbers.
        inside = first + 2 * _WARPS <= blocks
        block = arith.addi(pair, i32(first))
        block = pair if inside else arith.minui(block, i32(blocks - 2))
        constant = first if inside else 0
        sums = [[_zero()] * 4, [_zero()] * 4]
        for rows, start in sources:
            words = _load_four(_forward(start, block, _EIGHT * 16), constant * _EIGHT * 16)
            sums = [_multiply(rows, words[2 * i : 2 * i + 2], sums[i], element) for i in (0, 1)]
        _store_four(_forward(target, block, _EIGHT * 2), constant * _EIGHT * 2, _rounded(sums, taus, element))


def write_turned(out: Any, source: Any, offset: Any, *shifts: Any, heads: int) -> None:
    """Writes 16 rows by distance as rows by key; see `tile_rows.write_turned`.

    Each warp has every fourth row, each lane two neighbouring columns at a time: those are two halves of one word, or
    one half each of two neighbours.
    """
    given = [x.registers.item() for x in shifts]
    for i in range(0, ROWS, _WARPS):
        row = arith.addi(warp_in_group(), i32(i))
        _turn_row(out, source, row, _own(_ordinal(offset, row, heads), given))


def _turn_row(out: Any, source: Any, row: Any, shift: Any) -> None:
    width, extent = _row_length(out), _row_length(source)
    word = ir.IntegerType.get_signless(32)
    live, shift = arith.cmpi(arith.CmpIPredicate.sge, shift, i32(0)), arith.maxsi(shift, i32(0))
    odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(shift, i32(1)), i32(0))
    halves = arith.select(odd, i32(0x7610), i32(0x5432))
    column = arith.muli(lane_in_warp(), i32(2))
    distance = arith.subi(arith.addi(shift, i32(extent - 1)), column)
    source_row = _pointer(source, arith.muli(row, i32(extent)))
    target = _pointer(out, arith.addi(arith.muli(row, i32(width)), column))
    near = [utils.getelementptr(source_row, [_half(arith.subi(distance, i32(i)))], word) for i in (0, 1)]
    for first in range(0, width, 2 * LANES):
        distances = [arith.subi(distance, i32(first + i)) for i in (0, 1)]
        inner = first > 0 and first + 2 * LANES <= extent
        if inner:
            places = [utils.getelementptr(start, [-(first // 2)], word) for start in near]
        else:
            clipped = [arith.minsi(arith.maxsi(d, i32(0)), i32(extent - 1)) for d in distances]
            places = [utils.getelementptr(source_row, [_half(d)], word) for d in clipped]
        first_word, second_word = (llvm.load(word, place) for place in places)
        value = _permute(first_word, second_word, halves)
        if not inner:
            value = arith.andi(value, _mask_of(distances, extent))
        value = arith.select(live, value, i32(0))
        place = utils.getelementptr(target, [first // 2], word)
        if first + 2 * LANES <= width:
            llvm.store(value, place)
        else:
            branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.slt, column, i32(width - first)))
            with ir.InsertionPoint(branch.then_block):
                llvm.store(value, place)
                scf.yield_([])


def _held_row(lane: Any) -> Any:
    """Returns which row of a block of 8 rows a lane holds elements of."""
    return arith.shrui(lane, i32(2))


def _row_length(ref: Any) -> int:
    return math.prod(ir.MemRefType(ref.type).shape) // ROWS


def _ordinal(offset: Any, row: Any, heads: int) -> Any:
    """Returns of which token of the tile, counted from its first, a row is."""
    return arith.divui(arith.addi(offset.registers.item(), row), i32(heads))


def _own(ordinal: Any, values: Sequence[Any]) -> Any:
    """Returns values[ordinal], or None where there are none."""
    if not values:
        return None
    result = values[0]
    for i, value in enumerate(values[1:], 1):
        result = arith.select(arith.cmpi(arith.CmpIPredicate.eq, ordinal, i32(i)), value, result)
    return result


def _pointer(ref: Any, element: Any) -> Any:
    return utils.getelementptr(utils.memref_ptr(ref), [element], ir.MemRefType(ref.type).element_type)


def _address(ref: Any, element: Any) -> Any:
    return shared_address(_pointer(ref, element))


def _forward(address: Any, count: Any, size: int) -> Any:
    return arith.addi(address, arith.muli(count, i32(size)))


def _half(distance: Any) -> Any:
    return arith.shrsi(distance, i32(1))


def _row_of_matrix(lane: Any) -> tuple[Any, Any, Any]:
    """Returns which row of which of four matrices this lane names to the warp: (row, lower bit, upper bit)."""
    matrix = arith.shrui(lane, i32(3))
    return arith.andi(lane, i32(_EIGHT - 1)), arith.andi(matrix, i32(1)), arith.shrui(matrix, i32(1))


def _element_of_query(lane: Any) -> Any:
    """Returns where a lane's row lies: matrices are rows 0 to 7 and 8 to 15 of half of d_rel, then of the other."""
    row, lower, upper = _row_of_matrix(lane)
    row = arith.addi(row, arith.muli(lower, i32(_EIGHT)))
    return arith.addi(arith.muli(row, i32(16)), arith.muli(upper, i32(_EIGHT)))


def _element_of_projection(proj: Any, shift: Any, lane: Any) -> Any:
    """Returns where a lane's column lies: matrices are the halves of d_rel of 8 columns, then of the 8 that follow."""
    row, half, block = _row_of_matrix(lane)
    column = arith.addi(row, arith.muli(block, i32(_EIGHT)))
    column = arith.subi(arith.addi(column, i32(_EIGHT)), arith.maxsi(shift, i32(0)))
    column = arith.addi(column, arith.muli(half, i32(ir.MemRefType(proj.type).shape[1])))
    return arith.muli(column, i32(_EIGHT))


def _element_of_result(width: int, lane: Any) -> Any:
    """Returns where a lane's row goes: matrices are rows 0 to 7 and 8 to 15 of 8 columns, then of the 8 that follow."""
    row, lower, block = _row_of_matrix(lane)
    row = arith.addi(row, arith.muli(lower, i32(_EIGHT)))
    return arith.addi(arith.muli(row, i32(width)), arith.muli(block, i32(_EIGHT)))


def _live_rows(words: list[Any], ordinals: list[Any], token: int, shift: Any) -> list[Any]:
    """Returns the left operand of a product with zeros for the rows of other tokens, or for all if this one is dead."""
    live = arith.cmpi(arith.CmpIPredicate.sge, shift, i32(0))
    keeps = [arith.andi(live, arith.cmpi(arith.CmpIPredicate.eq, ordinal, i32(token))) for ordinal in ordinals]
    return [arith.select(keeps[i % 2], word, i32(0)) for i, word in enumerate(words)]


def _zero() -> Any:
    return utils.c(0.0, ir.F32Type.get())


def _multiply(rows: list[Any], columns: list[Any], sums: list[Any], element: Any) -> list[Any]:
    """Returns sums + rows @ columns: 16 x 16 by 16 x 8."""
    code = f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 "
    code += "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    kind = llvm.StructType.get_literal([ir.F32Type.get()] * 4)
    operands, constraints = [*rows, *columns, *sums], "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    result = llvm.inline_asm(kind, operands, code, constraints)
    return [llvm.extractvalue(ir.F32Type.get(), result, [i]) for i in range(4)]


def _rounded(sums: list[list[Any]], taus: list[Any], element: Any) -> list[Any]:
    """Returns the four matrices of a result as words of two elements, by rows 0 to 7 and 8 to 15 of each block."""
    words, word = [], ir.IntegerType.get_signless(32)
    for some in sums:
        for half, tau in enumerate(taus):
            pair = llvm.mlir_undef(ir.VectorType.get((2,), ir.F32Type.get()))
            for i, value in enumerate(some[2 * half : 2 * half + 2]):
                pair = vector.insert(value if tau is None else arith.mulf(value, tau), pair, [], [i])
            words.append(llvm.bitcast(word, arith.truncf(ir.VectorType.get((2,), element), pair)))
    return words


def _load_four(address: Any, offset: int) -> list[Any]:
    """Returns what this lane receives of four matrices; each lane names one row of one."""
    word = ir.IntegerType.get_signless(32)
    code = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];"
    kind = llvm.StructType.get_literal([word] * 4)
    words = llvm.inline_asm(kind, [address], code, "=r,=r,=r,=r,r,~{memory}", has_side_effects=True)
    return [llvm.extractvalue(word, words, [i]) for i in range(4)]


def _store_four(address: Any, offset: int, words: list[Any]) -> None:
    code = f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{offset}], {{$1,$2,$3,$4}};"
    llvm.inline_asm(None, [address, *words], code, "r,r,r,r,r,~{memory}", has_side_effects=True)


def _permute(first: Any, second: Any, halves: Any) -> Any:
    """Returns four of the eight bytes of two words, by their numbers."""
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [first, second, halves], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def _mask_of(distances: list[Any], extent: int) -> Any:
    """Returns ones in each half of a word whose distance has a bias."""
    masks = []
    for distance, ones in zip(distances, (0xFFFF, -0x10000), strict=True):
        inside = arith.cmpi(arith.CmpIPredicate.ult, distance, i32(extent))
        masks.append(arith.select(inside, i32(ones), i32(0)))
    return arith.ori(*masks)
