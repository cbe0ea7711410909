"""Attention for many query rows per sequence on sm_90: rows of a tile are (token, head of the group), in registers.

Persistent clusters of CTAs walk a list of tiles (`tile_list`), those with most keys first. The CTAs of a cluster have
different rows of a tile and the same keys, of which each fetches a part for all. In a CTA two warpgroups compute, 64
rows each, and take turns on the tensor core, so that one's softmax runs beside the other's products; the warps of a
third copy. `prefill_scratch` holds their protocol.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.integers import rem
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.hopper import prefill_mainloop, prefill_mainloop_pipelined, prefill_scratch
from inkling_pallas.kernels.hopper.prefill_scratch import Barriers, Smem
from inkling_pallas.kernels.phases import bias, epilogue, pages, softmax
from inkling_pallas.kernels.phases.operands import Gmem
from inkling_pallas.kernels.schedule import split_kv, tile_list
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tile_list import Counts, Tile
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS, RowTiling

# Registers of a thread: 3 x 128 threads share 64 K, so the copying warpgroup gives some to the two that compute.
_COMPUTING, _COPYING = 232, 40


def program(gmem: Gmem, out: Any, lse: Any, smem: Smem, bars: Barriers, tiling: RowTiling) -> None:
    """The kernel of one CTA."""
    warpgroup, place = lax.axis_index("wg"), _place(tiling)
    mosaic.wait_for_previous_kernel(interpret=tiling.interpret)

    @pl.when(warpgroup < WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_COMPUTING, action="increase")
        _compute(gmem, out, lse, smem, bars, warpgroup, place, tiling)

    @pl.when(warpgroup == WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_COPYING, action="decrease")
        _copy(gmem, smem, bars, place, tiling)


class Place(NamedTuple):
    """Which cluster a CTA belongs to, and which of its CTAs it is."""

    cluster: jax.Array
    rank: jax.Array


def _place(tiling: RowTiling) -> Place:
    rank = jnp.int32(0) if tiling.cluster_axis is None else lax.axis_index(tiling.cluster_axis)
    return Place(lax.axis_index("cluster"), rank)


def _copy(gmem: Gmem, smem: Smem, bars: Barriers, place: Place, tiling: RowTiling) -> None:
    """Runs one warp each for K, V, the bias and q. Arrives on every *_ready, waits on every *_free."""

    def copy_keys(slot: jax.Array, head: jax.Array, chunks: pages.Chunks) -> None:
        pages.note_absent(smem.absent, (0, slot), chunks, tiling)
        pages.fetch_tile(gmem.key, chunks, smem.k.at[slot], bars.k_ready.at[slot], head, tiling, values=False)

    def copy_values(slot: jax.Array, head: jax.Array, chunks: pages.Chunks) -> None:
        pages.fetch_tile(gmem.value, chunks, smem.v.at[slot], bars.v_ready.at[slot], head, tiling, values=True)

    @plgpu.warp_map
    def _(warp: jax.Array) -> None:
        pl.when(warp == 0)(lambda: _stream_cache(gmem, place.cluster, bars.k_free, copy_keys, tiling))
        pl.when(warp == 1)(lambda: _stream_cache(gmem, place.cluster, bars.v_free, copy_values, tiling))
        pl.when(warp == 2)(lambda: _stream_bias(gmem, smem, bars, place, tiling))
        if not tiling.shares_ring:
            pl.when(warp == 3)(lambda: _stream_queries(gmem, smem, bars, place, tiling))


def _wait_until_free(free: Any, count: jax.Array, slots: int, index: jax.Array) -> None:
    """Waits until a slot used `count` / slots times before is free again."""
    pl.when(count >= slots)(lambda: plgpu.barrier_wait(free.at[index]))


def _stream_cache(
    gmem: Gmem,
    cluster: jax.Array,
    free: Any,
    copy: Callable[[jax.Array, jax.Array, pages.Chunks], None],
    tiling: RowTiling,
) -> None:
    """Calls copy(stage, kv head, chunks) for each KV tile of a cluster once the stage is free.

    The page ids are asked for before that, so that they are there when it is.
    """
    stages = tiling.num_stages

    def copy_tile(tile: Tile, counts: Counts) -> None:
        @pl.loop(tile.piece.first_tile, tile.end)
        def _(t: jax.Array) -> None:
            count = counts.kv_tiles + t - tile.piece.first_tile
            stage = rem(count, stages)
            chunks = pages.find_chunks(gmem.block_table, tile.piece, t, tiling)
            _wait_until_free(free, count, stages, stage)
            copy(stage, tile.piece.head, chunks)

    total = tile_list.for_each_tile(gmem.plan, cluster, tiling, copy_tile).kv_tiles
    # The interpreter wants every completion of a barrier to be seen, and a CTA must not end before the others of its
    # cluster have last arrived here.
    if tiling.interpret or tiling.cluster_axis is not None:
        for i in range(stages):
            _wait_until_free(free, total + i, stages, rem(total + i, stages))


def _stream_bias(gmem: Gmem, smem: Smem, bars: Barriers, place: Place, tiling: RowTiling) -> None:
    """Copies the bias blocks of each tile; where q shares their ring, its rows before them."""
    slots = tiling.band_slots

    def wait(count: jax.Array, warpgroup: int) -> jax.Array:
        index = rem(count, slots) * WARPGROUPS + warpgroup
        _wait_until_free(bars.band_free, count, slots, index)
        return index

    def copy_tile(tile: Tile, counts: Counts) -> None:
        pieces = [tile_list.rows_of(tile, place.rank, w, tiling) for w in range(WARPGROUPS)]
        if tiling.shares_ring:
            for w, piece in enumerate(pieces):
                index = wait(counts.slots, w)
                block = prefill_scratch.query_slot(smem, rem(counts.slots, slots), w)
                _fetch_queries(gmem, block, bars.band_ready.at[index], piece, tiling)

        @pl.loop(tile.first_biased, tile.end)
        def _(t: jax.Array) -> None:
            count = counts.slots + tiling.query_items + t - tile.first_biased
            for w, piece in enumerate(pieces):
                index = wait(count, w)
                block = smem.band.at[rem(count, slots), w]
                bias.fetch_block(gmem.rel_logits, block, bars.band_ready.at[index], piece, t, tiling)

    total = tile_list.for_each_tile(gmem.plan, place.cluster, tiling, copy_tile).slots
    if tiling.interpret:
        for i in range(slots):
            for w in range(WARPGROUPS):
                wait(total + i, w)


def _stream_queries(gmem: Gmem, smem: Smem, bars: Barriers, place: Place, tiling: RowTiling) -> None:
    """Copies the query rows of each tile into their own buffer."""

    def copy_tile(tile: Tile, counts: Counts) -> None:
        for w in range(WARPGROUPS):
            _wait_until_free(bars.q_free, counts.tiles, 1, jnp.int32(w))
            block = prefill_scratch.query_slot(smem, 0, w)
            _fetch_queries(gmem, block, bars.q_ready.at[w], tile_list.rows_of(tile, place.rank, w, tiling), tiling)

    total = tile_list.for_each_tile(gmem.plan, place.cluster, tiling, copy_tile).tiles
    if tiling.interpret:
        for w in range(WARPGROUPS):
            _wait_until_free(bars.q_free, total, 1, jnp.int32(w))


def _fetch_queries(gmem: Gmem, block: Any, ready: Any, piece: Piece, tiling: RowTiling) -> None:
    """Starts the copy of a warpgroup's query rows.

    Rows past the sequence belong to the next one, or are zeros past the array, as are elements past head_dim, which
    only keep the rows apart.
    """
    # Traced, since Pallas refuses a static slice that leaves an array.
    group, width = tiling.problem.group, pl.ds(piece.row * 0, tiling.query_width)
    source = gmem.q.at[pl.ds(piece.row, tiling.token_block), pl.ds(piece.head * group, group), width]
    plgpu.copy_gmem_to_smem(source, block, ready)


def _compute(
    gmem: Gmem, out: Any, lse: Any, smem: Smem, bars: Barriers, warpgroup: jax.Array, place: Place, tiling: RowTiling
) -> None:
    """Attends a warpgroup's rows of each tile and writes them. Waits on every *_ready, arrives on every *_free."""

    def attend(tile: Tile, counts: Counts) -> None:
        work = prefill_mainloop.Work(tile, counts, tile_list.rows_of(tile, place.rank, warpgroup, tiling), warpgroup)
        walk = prefill_mainloop_pipelined.attend_tile if tiling.overlap else prefill_mainloop.attend_tile
        state = walk(smem, bars, work, tiling)
        _write_rows(out, lse, state, work.rows, tiling)

    tile_list.for_each_tile(gmem.plan, place.cluster, tiling, attend)

    @pl.when(warpgroup == 0)
    def _() -> None:
        cta = place.cluster * tiling.cluster_size + place.rank
        epilogue.clear_unowned_rows(out, lse, tile_list.table_of(gmem.plan.table), cta, tiling)


def _write_rows(out: Any, lse: Any, state: softmax.RowState, piece: Piece, tiling: RowTiling) -> None:
    """Writes the live rows of a warpgroup."""
    values, lse_log2 = softmax.finish_rows(state, None if tiling.overlap else softmax.ABSENT)
    live = piece.tokens * tiling.problem.group

    def row_of(row: Any) -> Any:
        return split_kv.output_row(tiling, piece, row)

    epilogue.store_products(out, values, row_of, live, tiling)
    if lse is not None:
        epilogue.store_scalars(lse, lse_log2 * softmax.LN_2, row_of, live, tiling, mosaic.WGMMA_ROWS)
