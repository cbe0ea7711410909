"""Which tiles of query rows a CTA of the prefill kernel attends: a list made on the device, and its bands.

An *item* of the list is `tile_tokens` rows of one sequence; each kv head attends it as one tile. Items are counted
from the lengths that the arrays hold, so that a `max_seqlen_q` past them costs nothing, and those with most keys come
first. Cluster c takes tiles c, 2n - 1 - c, 2n + c, ... of n clusters, heads fastest: heads read different keys, but
tiles that run at one time read the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.kernels import rows, schedule
from inkling_pallas.kernels.schedule import Piece, Table
from inkling_pallas.kernels.tiling import WARPGROUPS, RowTiling
from inkling_pallas.problem import Sequences


class Worklist(NamedTuple):
    """What the layers of a step share."""

    items: Any  # int32[max_items, len(Item._fields)]
    table: Any  # int32[6, batch], rows 0 to 5 of `schedule.Table`; row 4 is unused


class Item(NamedTuple):
    """Some rows of one sequence, for every kv head. int32."""

    sequence: jax.Array
    row: jax.Array  # first packed row
    tokens: jax.Array  # live ones
    kv_len: jax.Array
    first_pos: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    live_begin: jax.Array  # of a V tile the rows before it and from live_end on are cleared
    live_end: jax.Array
    total: jax.Array  # live items of the list


class Tile(NamedTuple):
    """An item for one kv head. `piece` spans the rows of all warpgroups of the cluster."""

    piece: Piece
    first_biased: jax.Array  # KV tile from which on bias blocks are copied
    end: jax.Array  # KV tile after the last
    live_begin: jax.Array
    live_end: jax.Array


class Counts(NamedTuple):
    """What each CTA of a cluster has done before a tile: KV tiles, slots of the bias ring, tiles."""

    kv_tiles: jax.Array
    slots: jax.Array
    tiles: jax.Array


class Bands(NamedTuple):
    """KV tiles of one warpgroup, in order: [first, edge) left of its window, [edge, biased) far, then biased, masked.

    All are clipped to the tiles of its cluster.
    """

    first: jax.Array
    edge_end: jax.Array
    biased: jax.Array
    diagonal: jax.Array
    end: jax.Array


def make_worklist(tiling: RowTiling, sequences: Sequences, all_sequences: Sequences | None = None) -> Worklist:
    """Returns the list for some sequences of a batch; the others have a q_len of 0 there, but not in all_sequences."""
    blocks = lax.div(sequences.q_len + (tiling.tile_tokens - 1), tiling.tile_tokens)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    index = jnp.arange(tiling.max_items, dtype=jnp.int32)
    items = _items_at(index, blocks, ends, tiling, sequences)
    if tiling.problem.batch_size == 1:  # Its last rows have most keys; under a window, but for a tile at its edges.
        order = jnp.clip(ends[-1] - 1 - index, 0, tiling.max_items - 1)
    else:
        order = jnp.argsort(jnp.where(index < ends[-1], -items.tiles, 1), stable=True)
    owners = sequences if all_sequences is None else all_sequences
    stop = lax.cummax(owners.q_start + owners.q_len)
    return Worklist(jnp.stack(items, axis=1)[order], jnp.stack([*owners, blocks, stop]))


def _items_at(index: jax.Array, blocks: jax.Array, ends: jax.Array, tiling: RowTiling, sequences: Sequences) -> Item:
    """Returns items in the order of their rows; those past the last have no tokens."""
    problem = tiling.problem
    sequence = jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, problem.batch_size - 1)
    start, q_len, kv_len, first_pos = (x[sequence] for x in sequences)
    skipped = (index - (ends - blocks)[sequence]) * tiling.tile_tokens
    tokens = jnp.clip(q_len - skipped, 0, tiling.tile_tokens)
    live_begin, live_end = _clean_keys(kv_len, q_len, tokens, first_pos, skipped, tiling)
    first_tile, tiles = schedule.tile_range(
        kv_len, tokens, first_pos + skipped, block_kv=tiling.block_kv, window_left=problem.window_left
    )
    return Item(
        sequence=sequence,
        row=start + skipped,
        tokens=tokens,
        kv_len=kv_len,
        first_pos=first_pos + skipped,
        first_tile=first_tile,
        tiles=tiles,
        live_begin=live_begin,
        live_end=live_end,
        total=jnp.broadcast_to(ends[-1], index.shape),
    )


def _clean_keys(
    kv_len: jax.Array, q_len: jax.Array, tokens: jax.Array, first_pos: jax.Array, skipped: jax.Array, tiling: RowTiling
) -> tuple[jax.Array, jax.Array]:
    """Returns [begin, end) of the keys of an item that come from finite memory.

    All that rows of the sequence see do. But chunks that the item needs none of are copies of its first or last, and
    where those are one chunk, it may hold the keys at an end of the sequence, and dead ones past them.
    """
    window_left = tiling.problem.window_left
    begin, end = schedule.live_keys(kv_len, q_len, first_pos, window_left=window_left)
    first, stop = schedule.live_keys(kv_len, tokens, first_pos + skipped, window_left=window_left)
    alone = lax.div(first, tiling.chunk) >= lax.div(jnp.maximum(stop, 1) - 1, tiling.chunk)
    return jnp.where(alone, first, begin), jnp.where(alone, stop, end)


def for_each_tile(items: Any, cluster: jax.Array, tiling: RowTiling, body: Callable[[Tile, Counts], None]) -> Counts:
    """Calls body(tile, counts) for each tile of a cluster and returns the counts after the last."""
    heads, clusters = tiling.problem.num_kv_heads, tiling.num_clusters
    total = items[0, Item._fields.index("total")] * heads

    def place_of(turn: jax.Array) -> jax.Array:
        return turn * clusters + jnp.where(lax.rem(turn, 2) == 0, cluster, clusters - 1 - cluster)

    def visit(turn: jax.Array, counts: Counts) -> Counts:
        place = place_of(turn)
        return lax.cond(place < total, lambda: attend(place, counts), lambda: counts)

    def attend(place: jax.Array, counts: Counts) -> Counts:
        row = lax.div(place, heads)
        tile = tile_of(Item(*(items[row, i] for i in range(len(Item._fields)))), lax.rem(place, heads), tiling)
        if tiling.prefetches_items:
            following = lax.div(place_of(counts.tiles + 1), heads)
            rows.prefetch(items, jnp.minimum(following, tiling.max_items - 1), interpret=tiling.interpret)
        body(tile, counts)
        return Counts(
            kv_tiles=counts.kv_tiles + tile.piece.tiles,
            slots=counts.slots + tile.end - tile.first_biased + tiling.query_items,
            tiles=counts.tiles + 1,
        )

    turns = lax.div(total + (clusters - 1), clusters)
    return lax.fori_loop(0, turns, visit, Counts(*[jnp.int32(0)] * 3))


def tile_of(item: Item, head: jax.Array, tiling: RowTiling) -> Tile:
    """Returns an item for one kv head."""
    zero = jnp.zeros_like(head)
    piece = Piece(
        sequence=item.sequence,
        head=head,
        row=item.row,
        tokens=item.tokens,
        kv_len=item.kv_len,
        first_pos=item.first_pos,
        first_tile=item.first_tile,
        begin=zero,
        end=item.tiles,
        tiles=item.tiles,
        base=zero,
    )
    end = item.first_tile + item.tiles
    return Tile(piece, _first_biased(piece, end, tiling), end, item.live_begin, item.live_end)


def _first_biased(piece: Piece, end: jax.Array, tiling: RowTiling) -> jax.Array:
    """Returns the KV tile from which on all warpgroups add a bias.

    All those with a mask do, and under a window all do: few are far there, if any.
    """
    problem = tiling.problem
    if problem.window_left is not None:
        return piece.first_tile
    biased = schedule.first_biased_tile(piece.first_pos, block_kv=tiling.block_kv, rel_extent=problem.rel_extent)
    return jnp.clip(jnp.minimum(biased, _first_masked(piece, tiling)), piece.first_tile, end)


def _first_masked(piece: Piece, tiling: RowTiling) -> jax.Array:
    """Returns the KV tile from which on the first row does not see every key."""
    return lax.div(jnp.maximum(jnp.minimum(piece.kv_len, piece.first_pos + 1), 0), tiling.block_kv)


def rows_of(tile: Tile, rank: Any, warpgroup: Any, tiling: RowTiling) -> Piece:
    """Returns the rows that a warpgroup of the cluster's CTA `rank` has of a tile; maybe none of them is live."""
    skipped = (jnp.asarray(rank, jnp.int32) * WARPGROUPS + warpgroup) * tiling.token_block
    piece = tile.piece
    return piece._replace(
        row=piece.row + skipped,
        tokens=jnp.clip(piece.tokens - skipped, 0, tiling.token_block),
        first_pos=piece.first_pos + skipped,
    )


def bands_of(tile: Tile, rows: Piece, tiling: RowTiling) -> Bands:
    """Returns which KV tiles of a warpgroup's rows need a bias and which a mask."""
    first, window_left = tile.piece.first_tile, tiling.problem.window_left
    edge_end = first
    if window_left is not None:
        hidden = jnp.maximum(rows.first_pos + tiling.token_block - 1 - window_left, 0)
        edge_end = jnp.clip(lax.div(hidden + (tiling.block_kv - 1), tiling.block_kv), first, tile.end)
    biased = jnp.maximum(tile.first_biased, edge_end)
    return Bands(first, edge_end, biased, jnp.clip(_first_masked(rows, tiling), biased, tile.end), tile.end)


def table_of(words: Any) -> Table:
    """Returns the table of a list, read from global memory."""
    return Table(lambda row, sequence: words[row, sequence])
