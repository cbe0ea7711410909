"""Which part of a batch a CTA works on: integer arithmetic from lengths to tiles, bands and CTAs.

The rows of a sequence are cut into blocks of `token_block` tokens. A *unit* is one such block for one kv head: it
walks the KV tiles that any of its rows sees. All units of all sequences, one after the other, form a *line*: of each
unit first a lead, which stands for what starting and ending it costs, then its tiles. CTA c of `num_ctas` takes an
equal, contiguous share of the line. A *piece* is what a CTA has of one unit; a unit that is cut into several pieces
needs the combine kernel. Where no unit may be cut, the line is one of units, and CTAs take turns, or clusters do, whose
CTAs have an equal share of each unit's tiles.

Everything here is plain arithmetic on int32 scalars or arrays, on a device or on the host.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.core.integers import div, rem
from inkling_pallas.core.problem import Lengths, Sequences
from inkling_pallas.kernels.schedule import seq_table, stream_k
from inkling_pallas.kernels.schedule.seq_table import Table, keep_taken
from inkling_pallas.kernels.schedule.tiling import Tiling


class Span(NamedTuple):
    """A sequence on the line. int32 scalars."""

    sequence: jax.Array
    row: jax.Array  # first packed row
    q_len: jax.Array
    kv_len: jax.Array
    first_pos: jax.Array
    first_tile: jax.Array  # of every unit
    tiles: jax.Array  # of every unit
    blocks: jax.Array  # live token blocks
    base: jax.Array  # where it begins on the line
    unit_length: jax.Array  # of a unit on the line


class Walked(NamedTuple):
    """What a CTA has walked. int32 scalars."""

    pieces: jax.Array
    tiles: jax.Array


class Piece(NamedTuple):
    """A run of tiles of one unit. int32 scalars; `first_pos` and `kv_len` are in keys of the block table."""

    sequence: jax.Array
    head: jax.Array  # kv head
    row: jax.Array  # first packed row
    tokens: jax.Array  # live ones
    kv_len: jax.Array
    first_pos: jax.Array
    first_tile: jax.Array  # of the unit
    begin: jax.Array  # tiles of this piece, counted from the unit's first
    end: jax.Array
    tiles: jax.Array  # of the unit
    base: jax.Array  # where the unit's tiles begin on the line


def tile_range(
    kv_len: jax.Array, tokens: jax.Array, first_pos: jax.Array, *, block_kv: int, window_left: int | None
) -> tuple[jax.Array, jax.Array]:
    """Returns (first tile, tiles) that hold every key which one of `tokens` causal rows sees.

    A unit without any such key has one tile all the same, whose mask is empty, so that its rows are written.
    """
    begin, end = live_keys(kv_len, tokens, first_pos, window_left=window_left)
    last = div(jnp.maximum(end, 1) - 1, block_kv)
    first = jnp.minimum(div(begin, block_kv), last)
    return first, last - first + 1


def live_keys(
    kv_len: jax.Array, tokens: jax.Array, first_pos: jax.Array, *, window_left: int | None
) -> tuple[jax.Array, jax.Array]:
    """Returns [begin, end) of the keys that some row sees."""
    end = jnp.maximum(jnp.minimum(kv_len, first_pos + tokens), 0)
    if window_left is None:
        return jnp.zeros_like(end), end
    return jnp.maximum(first_pos - window_left, 0), end


def first_biased_tile(first_pos: jax.Array, *, block_kv: int, rel_extent: int) -> jax.Array:
    """Returns the tile from which on some pair has dist < rel_extent; all tiles before it are far."""
    return div(jnp.maximum(first_pos - rel_extent + 1, 0), block_kv)


def line_length(sequence: Sequences, tiling: Tiling) -> tuple[Sequences, jax.Array]:
    """Returns a sequence with the rows that this kernel attends, and how long it is on the line of one kv head."""
    kept = sequence._replace(q_len=keep_taken(sequence, tiling))
    window_left = tiling.problem.window_left
    _, tiles = tile_range(kept.kv_len, kept.q_len, kept.first_pos, block_kv=tiling.block_kv, window_left=window_left)
    blocks = div(kept.q_len + (tiling.token_block - 1), tiling.token_block)
    return kept, blocks * _unit_length(tiles, tiling)


def _unit_length(tiles: jax.Array, tiling: Tiling) -> jax.Array:
    """Returns how long a unit of so many tiles is on the line."""
    return jnp.ones_like(tiles) if tiling.whole_units else tiles + tiling.unit_lead


def fill_table(lengths: Lengths, table_smem: Any, tiling: Tiling, *, by_warp: bool = False) -> Table:
    """Makes the table of a decode kernel: the work of a sequence is its length on the line of one kv head."""
    return seq_table.fill(lengths, table_smem, functools.partial(line_length, tiling=tiling), tiling, by_warp=by_warp)


def table_on_host(sequences: Sequences, tiling: Tiling) -> Table:
    """Returns the table of some sequences as `fill_table` would make it."""
    return seq_table.on_host(sequences, functools.partial(line_length, tiling=tiling))


def find_sequence(table: Table, position: jax.Array, tiling: Tiling) -> jax.Array:
    """Returns the sequence that holds a position of the line, the last one for a position past the end."""
    return table.find(div(position, tiling.problem.num_kv_heads), tiling.problem.batch_size)


def sequence_at(table: Table, sequence: jax.Array, tiling: Tiling) -> Span:
    """Returns what the units of a sequence share."""
    problem, block = tiling.problem, tiling.token_block
    row, q_len, kv_len, first_pos = table.facts(sequence)
    first_tile, tiles = tile_range(kv_len, q_len, first_pos, block_kv=tiling.block_kv, window_left=problem.window_left)
    return Span(
        sequence=sequence,
        row=row,
        q_len=q_len,
        kv_len=kv_len,
        first_pos=first_pos,
        first_tile=first_tile,
        tiles=tiles,
        blocks=div(q_len + (block - 1), block),
        base=table.work_before(sequence) * problem.num_kv_heads,
        unit_length=_unit_length(tiles, tiling),
    )


def unit_of(span: Span, unit: jax.Array, tiling: Tiling) -> Piece:
    """Returns a whole unit of a sequence.

    Heads outermost, so that the token blocks that read the same keys are neighbours.
    """
    head, skipped = unit, jnp.zeros_like(unit)
    if tiling.token_blocks > 1:
        blocks = jnp.maximum(span.blocks, 1)
        head, skipped = div(unit, blocks), rem(unit, blocks) * tiling.token_block
    return Piece(
        sequence=span.sequence,
        head=head,
        row=span.row + skipped,
        tokens=jnp.minimum(span.q_len - skipped, tiling.token_block),
        kv_len=span.kv_len,
        first_pos=span.first_pos + skipped,
        first_tile=span.first_tile,
        begin=jnp.zeros_like(unit),
        end=span.tiles,
        tiles=span.tiles,
        base=span.base + unit * span.unit_length + tiling.unit_lead,
    )


def unit_at(table: Table, position: jax.Array, tiling: Tiling) -> tuple[Span, Piece]:
    """Returns the sequence and the whole unit that hold a position of the line."""
    span = sequence_at(table, find_sequence(table, position, tiling), tiling)
    return span, unit_of(span, div(position - span.base, span.unit_length), tiling)


def for_each_piece(
    table: Table, cta: jax.Array, tiling: Tiling, body: Callable[[jax.Array, jax.Array, Piece], None]
) -> Walked:
    """Calls body(pieces before, tiles before, piece) for each piece of a CTA and returns how many there were."""
    line = stream_k.make_line(table, tiling)
    if tiling.whole_units:
        return _for_each_unit(table, line.length, cta, tiling, body)
    start, stop = stream_k.share_start(line, cta), stream_k.share_start(line, cta + 1)
    reached = stop - tiling.unit_lead  # Where a share ends right after a unit's lead, its tiles are the next CTA's.

    def visit(unit: jax.Array, carry: tuple[jax.Array, jax.Array], span: Span) -> tuple[jax.Array, jax.Array]:
        index, done = carry
        piece = unit_of(span, unit, tiling)
        piece = piece._replace(begin=jnp.maximum(start - piece.base, 0), end=jnp.minimum(stop - piece.base, span.tiles))
        body(index, done, piece)
        return index + 1, done + piece.end - piece.begin

    def visit_units(sequence: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        span = sequence_at(table, sequence, tiling)
        end = jnp.minimum(reached - span.base, span.blocks * tiling.problem.num_kv_heads * span.unit_length)
        first = div(jnp.maximum(start - span.base, 0), span.unit_length)
        last = div(end + (span.unit_length - 1), span.unit_length)
        return lax.fori_loop(first, last, lambda unit, carry: visit(unit, carry, span), carry)

    first = find_sequence(table, start, tiling)
    last = jnp.where(stop > start, find_sequence(table, reached - 1, tiling), first - 1)
    return Walked(*lax.fori_loop(first, last + 1, visit_units, (jnp.int32(0), jnp.int32(0))))


def _for_each_unit(
    table: Table,
    units: jax.Array,
    cta: jax.Array,
    tiling: Tiling,
    body: Callable[[jax.Array, jax.Array, Piece], None],
) -> Walked:
    """Does what `for_each_piece` does where CTAs, or clusters of them, take whole units in turn, of `units` in all.

    What runs at the same time are then neighbours, heads of the same keys, which lie side by side in memory.
    """
    clusters, cluster = tiling.num_ctas // tiling.ranks, div(cta, tiling.ranks)

    def visit(index: jax.Array, done: jax.Array) -> jax.Array:
        _, unit = unit_at(table, cluster + index * clusters, tiling)
        piece = part_of(unit, rem(cta, tiling.ranks), tiling)
        body(index, done, piece)
        return done + piece.end - piece.begin

    mine = div(jnp.maximum(units - cluster + (clusters - 1), 0), clusters)
    return Walked(mine, lax.fori_loop(0, mine, visit, jnp.int32(0)))


def part_of(unit: Piece, rank: jax.Array, tiling: Tiling) -> Piece:
    """Returns what a CTA of a cluster has of a unit: an equal share of its tiles, or none."""
    if tiling.ranks == 1:
        return unit
    begin, end = (div(unit.tiles * r, tiling.ranks) for r in (rank, rank + 1))
    return unit._replace(begin=begin, end=end)


def slot_of(cta: Any, piece_ends_unit: Any) -> jax.Array:
    """Returns where a CTA leaves the partial result of a piece; a CTA has at most one of either kind."""
    return 2 * cta + jnp.where(piece_ends_unit, 0, 1)


def output_row(tiling: Tiling, piece: Piece, row: Any) -> Any:
    """Returns the row of the result, counted in heads, for a row of a unit. The only map from one to the other."""
    group, token = tiling.problem.group, tiling.token_of(row)
    member = row - token * group
    return (piece.row + token) * tiling.problem.num_heads + piece.head * group + member
