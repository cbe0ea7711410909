"""The copying warps of the kernel for sm_100: K, V and the bias, into the rings of `tensor_buffers`."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels import band, pages, worklist
from inkling_pallas.kernels.prefill_buffers import Gmem
from inkling_pallas.kernels.schedule import Piece
from inkling_pallas.kernels.tensor_buffers import Barriers, Smem
from inkling_pallas.kernels.tensor_tiling import TensorTiling
from inkling_pallas.kernels.tiling import WARPGROUPS
from inkling_pallas.kernels.worklist import Counts, Tile


def stream_keys(gmem: Gmem, smem: Smem, bars: Barriers, cta: jax.Array, tiling: TensorTiling) -> None:
    """Copies K. Arrives on k_ready, waits on k_free."""

    def copy(stage: jax.Array, piece: Piece, t: jax.Array) -> None:
        ready = bars.k_ready.at[stage]
        pages.fetch_tile(gmem.key, gmem.block_table, smem.k.at[stage], ready, piece, t, tiling, values=False)

    _stream_cache(gmem, bars.k_free, copy, cta, tiling)


def stream_values(gmem: Gmem, smem: Smem, bars: Barriers, cta: jax.Array, tiling: TensorTiling) -> None:
    """Copies V. Arrives on v_ready, waits on v_free."""

    def copy(stage: jax.Array, piece: Piece, t: jax.Array) -> None:
        ready = bars.v_ready.at[stage]
        pages.fetch_tile(gmem.value, gmem.block_table, smem.v.at[stage], ready, piece, t, tiling, values=True)

    _stream_cache(gmem, bars.v_free, copy, cta, tiling)


def _wait_until_free(free: Any, count: jax.Array, slots: int, index: jax.Array) -> None:
    """Waits until a slot used `count` / slots times before is free again."""
    pl.when(count >= slots)(lambda: plgpu.barrier_wait(free.at[index]))


def _stream_cache(
    gmem: Gmem,
    free: Any,
    copy: Callable[[jax.Array, Piece, jax.Array], None],
    cta: jax.Array,
    tiling: TensorTiling,
) -> None:
    """Calls copy(stage, piece, KV tile) for each KV tile of a CTA once the stage is free."""
    stages = tiling.num_stages

    def copy_tile(tile: Tile, counts: Counts) -> None:
        @pl.loop(tile.piece.first_tile, tile.end)
        def _(t: jax.Array) -> None:
            count = counts.kv_tiles + t - tile.piece.first_tile
            stage = lax.rem(count, stages)
            _wait_until_free(free, count, stages, stage)
            copy(stage, tile.piece, t)

    total = worklist.for_each_tile(gmem.work, cta, tiling, copy_tile).kv_tiles
    if tiling.interpret:  # It wants every completion of a barrier to be seen.
        for i in range(stages):
            _wait_until_free(free, total + i, stages, lax.rem(total + i, stages))


def stream_bias(gmem: Gmem, smem: Smem, bars: Barriers, cta: jax.Array, tiling: TensorTiling) -> None:
    """Copies the bias blocks of both warpgroups. Arrives on band_ready, waits on band_free."""
    slots = tiling.band_slots

    def wait(count: jax.Array, warpgroup: int) -> jax.Array:
        index = lax.rem(count, slots) * WARPGROUPS + warpgroup
        _wait_until_free(bars.band_free, count, slots, index)
        return index

    def copy_tile(tile: Tile, counts: Counts) -> None:
        pieces = [worklist.rows_of(tile, 0, w, tiling) for w in range(WARPGROUPS)]

        @pl.loop(tile.first_biased, tile.end)
        def _(t: jax.Array) -> None:
            count = counts.slots + t - tile.first_biased
            for w, piece in enumerate(pieces):
                index = wait(count, w)
                block = smem.band.at[lax.rem(count, slots), w]
                band.fetch_block(gmem.rel_logits, block, bars.band_ready.at[index], piece, t, tiling)

    total = worklist.for_each_tile(gmem.work, cta, tiling, copy_tile).slots
    if tiling.interpret:
        for i in range(slots):
            for w in range(WARPGROUPS):
                wait(total + i, w)
