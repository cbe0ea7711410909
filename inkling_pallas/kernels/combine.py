"""Merges what several CTAs found for one unit: the second kernel of split-KV attention.

It is launched while the attention kernel still runs (programmatic dependent launch), works out which units were cut,
and waits. A CTA merges `rows` rows and `width` elements of one unit; with `strands` > 1 its threads also share the
pieces among them and meet in shared memory. Which shape is best depends on how many pieces a unit can have and on how
many units there are.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.integers import div, rem
from inkling_pallas.core.problem import Lengths
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.phases import epilogue, softmax
from inkling_pallas.kernels.schedule import split_kv, stream_k
from inkling_pallas.kernels.schedule.seq_table import smem_type
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tiling import Tiling

# With this many units to merge the card is full even if a CTA takes many rows.
_MANY_MERGES = 48
# Loads in flight: more pieces than this per strand go in rounds.
_MAX_UNROLL = 36


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How a merge is spread over CTAs and threads. Static."""

    by_unit: bool  # a CTA row per unit, else one per boundary between two CTAs' shares
    merges: int  # CTA rows
    rows: int
    width: int
    strands: int
    unroll: int

    @property
    def elements(self) -> tuple[int, int]:
        """Shape of a CTA's register arrays."""
        return self.strands * self.rows, self.width

    @property
    def layout(self) -> Any:
        """Layout of a CTA's register arrays."""
        return mosaic.strided(self.elements, max(1, min(4, self.strands * self.rows * self.width // mosaic.THREADS)))


class Cut(NamedTuple):
    """A unit that was cut into `pieces`, the first of them by CTA `first`.

    `live` is false where there is nothing to merge.
    """

    unit: Piece
    first: jax.Array
    pieces: jax.Array
    live: jax.Array


def choose_shape(tiling: Tiling) -> Shape:
    """Returns the measured choice.

    Many rows a CTA, one row a CTA, or a quarter of a row with the pieces shared by four strands.
    """
    problem = tiling.problem
    units = tiling.most_units
    by_unit = units <= tiling.num_ctas
    merges = units if by_unit else tiling.num_ctas - 1
    pieces = tiling.num_ctas // units + 2  # of a unit, if all are of one length; others take several rounds
    if merges >= _MANY_MERGES:
        rows = min(1024 // problem.head_dim, max(4, 1 << (tiling.rows - 1).bit_length()))
        width, strands, unroll = problem.head_dim, 1, 4
        if tiling.rows > rows:  # Twice the rows a CTA, so that all CTAs find room beside the attention kernel's.
            rows, unroll = 2 * rows, 2
    elif pieces <= _MAX_UNROLL:
        rows, width, strands, unroll = max(1, mosaic.THREADS // problem.head_dim), problem.head_dim, 1, pieces
    else:
        rows, width, strands, unroll = 1, 32, 4, -(-pieces // 4)
    return Shape(
        by_unit=by_unit, merges=merges, rows=rows, width=width, strands=strands, unroll=min(unroll, _MAX_UNROLL)
    )


def part_types(tiling: Tiling) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the partial results that the attention kernel leaves, `part_out` and `part_lse`."""
    parts, head_dim = tiling.slots * tiling.rows, tiling.problem.head_dim
    return [jax.ShapeDtypeStruct((parts, width), jnp.float32) for width in (head_dim, 1)]


def merge_pieces(
    part_out: jax.Array,
    part_lse: jax.Array,
    lengths: Lengths,
    outputs: tuple[jax.Array, ...],
    tiling: Tiling,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Returns the outputs with the rows of every unit that was cut filled in, in place where XLA can.

    Args:
      part_out: float32[slots * rows, head_dim], normalised rows of pieces.
      part_lse: float32[slots * rows, 1], their log-sum-exp in log2 units.
      lengths: the caller's.
      outputs: [num_tokens * num_heads, head_dim] and, where wanted, float32[num_tokens * num_heads, 1].
      tiling: that of the attention kernel.
      interpret: as in `plgpu.kernel`.
    """
    shape, problem = choose_shape(tiling), tiling.problem
    across = problem.head_dim // shape.width
    scratch = [smem_type(tiling)] + [plgpu.SMEM(shape.elements, jnp.float32)] * 3
    refs = [jax.new_ref(outputs[0].reshape(-1, shape.width)), *map(jax.new_ref, outputs[1:])]
    inputs, structure = jax.tree.flatten((part_out.reshape(-1, shape.width), part_lse, lengths))

    def combine_pieces(*refs: Any) -> None:
        part_out, part_lse, lengths = jax.tree.unflatten(structure, refs[: len(inputs)])
        written, (table_smem, *exchange) = refs[len(inputs) : -len(scratch)], refs[-len(scratch) :]
        cut = _find_cut(lengths, table_smem, shape, tiling)
        block = lax.axis_index("block")
        row = div(block, across) * shape.rows
        live = jnp.minimum(cut.unit.tokens * problem.group - row, shape.rows)

        @pl.when(cut.live & (live > 0))
        def _() -> None:
            state = _read_pieces(part_out, part_lse, cut, row, rem(block, across), shape, tiling)
            state = state if shape.strands == 1 else _join_strands(state, exchange, shape, tiling)
            _write(written, state, cut, row, rem(block, across), live, shape, tiling)

    blocks = -(-tiling.rows // shape.rows) * across
    grid = {"grid": (blocks, shape.merges), "grid_names": ("block", "merge"), "num_threads": 1}
    merge = mosaic.kernel(combine_pieces, interpret=interpret, out_type=(), scratch_types=scratch, **grid)
    merge(*inputs, *refs)
    return tuple(jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, outputs, strict=True))


def _find_cut(lengths: Lengths, table_smem: Any, shape: Shape, tiling: Tiling) -> Cut:
    """Returns the unit that this CTA row merges, and waits for the attention kernel.

    Every CTA must, or this kernel could end first.
    """
    table, index = split_kv.fill_table(lengths, table_smem, tiling), lax.axis_index("merge")
    line = stream_k.make_line(table, tiling)
    if shape.by_unit:
        per_sequence = tiling.problem.num_kv_heads * tiling.token_blocks
        span = split_kv.sequence_at(table, div(index, per_sequence), tiling)
        unit = split_kv.unit_of(span, rem(index, per_sequence), tiling)
        first = stream_k.share_of(line, unit.base)
        mine = (unit.tokens > 0) & (unit.head < tiling.problem.num_kv_heads)
    else:
        position = stream_k.share_start(line, index + 1)
        span, unit = split_kv.unit_at(table, position, tiling)
        first = index
        mine = (position > unit.base) & (stream_k.share_start(line, index) <= unit.base) & (position < line.length)
    last = stream_k.share_of(line, unit.base + unit.tiles - 1)
    mosaic.wait_for_previous_kernel(interpret=tiling.interpret)
    return Cut(unit, first, last - first + 1, mine & (last > first))


def _read_pieces(
    part_out: Any, part_lse: Any, cut: Cut, row: Any, column: Any, shape: Shape, tiling: Tiling
) -> softmax.Merged:
    """Returns each strand's merge of its pieces."""
    layout, elements = shape.layout, shape.elements
    across = tiling.problem.head_dim // shape.width
    index, element = (mosaic.iota(elements, axis, layout) for axis in (0, 1))
    strand = div(index, jnp.full_like(index, shape.rows))
    my_row = jnp.minimum(row + rem(index, jnp.full_like(index, shape.rows)), tiling.rows - 1)

    def load(piece: jax.Array) -> tuple[jax.Array, jax.Array]:
        inside = piece < cut.pieces
        last = piece >= cut.pieces - 1
        slot = split_kv.slot_of(cut.first + jnp.minimum(piece, cut.pieces - 1), last) * tiling.rows + my_row
        lse = mosaic.gather(
            part_lse, slot, jnp.zeros_like(slot), layout=layout, vectors="shared", interpret=tiling.interpret
        )
        value = mosaic.gather(
            part_out, slot * across + column, element, layout=layout, vectors="neighbours", interpret=tiling.interpret
        )
        return value, jnp.where(inside, lse, jnp.full_like(lse, -jnp.inf))

    def some(round_: jax.Array, state: softmax.Merged) -> softmax.Merged:
        loaded = [load((round_ * shape.unroll + i) * shape.strands + strand) for i in range(shape.unroll)]
        return softmax.merge(state, [value for value, _ in loaded], [lse for _, lse in loaded])

    zero = mosaic.full(elements, 0.0, jnp.float32, layout)
    start = softmax.Merged(zero, mosaic.full(elements, -jnp.inf, jnp.float32, layout), zero)
    per_round = shape.unroll * shape.strands
    return lax.fori_loop(0, div(cut.pieces + (per_round - 1), per_round), some, start)


def _join_strands(state: softmax.Merged, exchange: list[Any], shape: Shape, tiling: Tiling) -> softmax.Merged:
    """Returns the merge of all strands, the same in each."""
    for ref, x in zip(exchange, state, strict=True):
        ref[...] = x
    plgpu.commit_smem()
    index, element = (mosaic.iota(shape.elements, axis, shape.layout) for axis in (0, 1))
    row = rem(index, jnp.full_like(index, shape.rows))

    def of_strand(i: int) -> softmax.Merged:
        rows = row + i * shape.rows
        return softmax.Merged(
            *(mosaic.gather(ref, rows, element, layout=shape.layout, interpret=tiling.interpret) for ref in exchange)
        )

    strands = [of_strand(i) for i in range(shape.strands)]
    return softmax.join(strands)


def _write(
    outputs: Any, state: softmax.Merged, cut: Cut, row: Any, column: Any, live: Any, shape: Shape, tiling: Tiling
) -> None:
    value, lse_log2 = softmax.finish_merge(state)
    across = tiling.problem.head_dim // shape.width

    def row_of(r: Any) -> Any:
        return split_kv.output_row(tiling, cut.unit, r + row)

    epilogue.store_rows(outputs[0], value, lambda r: row_of(r) * across + column, live, shape.layout, tiling)
    if len(outputs) > 1:
        alone = jnp.where(column == 0, live, 0)
        epilogue.store_row_scalars(outputs[1], lse_log2 * softmax.LN_2, row_of, alone, shape.layout, tiling)
