"""Which tiles of query rows a CTA of the prefill kernel attends: a list that `tile_list_kernel` makes, and its bands.

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

from inkling_pallas.core.integers import div, rem
from inkling_pallas.kernels.schedule import split_kv
from inkling_pallas.kernels.schedule.seq_table import Table
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS, RowTiling


class Worklist(NamedTuple):
    """What the layers of a step share."""

    items: Any  # int32[>= max_items, ITEM_WORDS]; those past the last are undefined
    table: Any  # int32[7, batch], see `table.Table`; the work of a sequence is its items


class Item(NamedTuple):
    """Some rows of one sequence, for every kv head. int32."""

    sequence: jax.Array
    row: jax.Array  # first packed row
    tokens: jax.Array  # live ones
    kv_len: jax.Array
    first_pos: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    clean_begin: jax.Array  # keys outside may come from memory that holds anything
    clean_end: jax.Array


ITEM_WORDS = 16  # between items: an item is in one sector of 64 bytes


class Tile(NamedTuple):
    """An item for one kv head. `piece` spans the rows of all warpgroups of the cluster."""

    piece: Piece
    first_biased: jax.Array  # KV tile from which on bias blocks are copied
    end: jax.Array  # KV tile after the last
    clean_begin: jax.Array
    clean_end: jax.Array


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


def for_each_tile(
    work: Worklist, cluster: jax.Array, tiling: RowTiling, body: Callable[[Tile, Counts], None]
) -> Counts:
    """Calls body(tile, counts) for each tile of a cluster and returns the counts after the last."""
    heads, clusters = tiling.problem.num_kv_heads, tiling.num_clusters
    total = table_of(work.table).at(4, tiling.problem.batch_size - 1) * heads

    def visit(turn: jax.Array, counts: Counts) -> Counts:
        place = turn * clusters + jnp.where(rem(turn, 2) == 0, cluster, clusters - 1 - cluster)
        return lax.cond(place < total, lambda: attend(place, counts), lambda: counts)

    def attend(place: jax.Array, counts: Counts) -> Counts:
        row = div(place, heads)
        tile = tile_of(Item(*(work.items[row, i] for i in range(len(Item._fields)))), rem(place, heads), tiling)
        body(tile, counts)
        return Counts(
            kv_tiles=counts.kv_tiles + tile.piece.tiles,
            slots=counts.slots + tile.end - tile.first_biased + tiling.query_items,
            tiles=counts.tiles + 1,
        )

    turns = div(total + (clusters - 1), clusters)
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
    return tile_from(piece, item.clean_begin, item.clean_end, tiling)


def tile_from(piece: Piece, clean_begin: jax.Array, clean_end: jax.Array, tiling: RowTiling) -> Tile:
    """Returns a piece whose first tile is its own as a tile."""
    end = piece.first_tile + piece.end - piece.begin
    return Tile(piece, _first_biased(piece, end, tiling), end, clean_begin, clean_end)


def _first_biased(piece: Piece, end: jax.Array, tiling: RowTiling) -> jax.Array:
    """Returns the KV tile from which on all warpgroups add a bias.

    All those with a mask do, and under a window all do: few are far there, if any.
    """
    problem = tiling.problem
    if problem.window_left is not None:
        return piece.first_tile
    biased = split_kv.first_biased_tile(piece.first_pos, block_kv=tiling.block_kv, rel_extent=problem.rel_extent)
    return jnp.clip(jnp.minimum(biased, _first_masked(piece, tiling)), piece.first_tile, end)


def _first_masked(piece: Piece, tiling: RowTiling) -> jax.Array:
    """Returns the KV tile from which on the first row does not see every key."""
    return div(jnp.maximum(jnp.minimum(piece.kv_len, piece.first_pos + 1), 0), tiling.block_kv)


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
        edge_end = jnp.clip(div(hidden + (tiling.block_kv - 1), tiling.block_kv), first, tile.end)
    biased = jnp.maximum(tile.first_biased, edge_end)
    return Bands(first, edge_end, biased, jnp.clip(_first_masked(rows, tiling), biased, tile.end), tile.end)


def clean_rows_of(tile: Tile, t: jax.Array, tiling: RowTiling) -> tuple[jax.Array, jax.Array]:
    """Returns [begin, end) of the rows of KV tile t that come from finite memory; may be past the tile's own."""
    first_key = t * tiling.block_kv
    return tile.clean_begin - first_key, tile.clean_end - first_key


def table_of(words: Any) -> Table:
    """Returns the table of a list, read from global memory."""
    return Table(lambda row, sequence: words[row, sequence])
