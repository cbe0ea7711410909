"""The copying warps of the kernel for sm_100: K, V and the bias, into the rings of `scratch`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels.blackwell import work_loop
from inkling_pallas.kernels.blackwell.scratch import Barriers, Smem
from inkling_pallas.kernels.blackwell.tiling import TensorTiling
from inkling_pallas.kernels.blackwell.work_loop import Walk
from inkling_pallas.kernels.phases import bias, pages
from inkling_pallas.kernels.phases.operands import Gmem
from inkling_pallas.kernels.schedule.tile_list import Tile
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS


def stream_keys(gmem: Gmem, smem: Smem, bars: Barriers, walk: Walk, tiling: TensorTiling) -> None:
    """Copies K and notes which chunks are absent. Arrives on k_ready, waits on k_free."""

    def copy(count: jax.Array, head: jax.Array, chunks: pages.Chunks) -> None:
        stage = work_loop.stage_of(count, tiling)
        pages.note_absent(smem.absent, (0, tiling.note_slot(count)), chunks, tiling)
        pages.fetch_tile(gmem.key, chunks, smem.k.at[stage], bars.k_ready.at[stage], head, tiling, values=False)

    _stream_cache(gmem.block_table, bars.k_free, copy, walk, tiling)


def stream_values(gmem: Gmem, smem: Smem, bars: Barriers, walk: Walk, tiling: TensorTiling) -> None:
    """Copies V. Arrives on v_ready, waits on v_free."""

    def copy(count: jax.Array, head: jax.Array, chunks: pages.Chunks) -> None:
        stage = work_loop.stage_of(count, tiling)
        pages.fetch_tile(gmem.value, chunks, smem.v.at[stage], bars.v_ready.at[stage], head, tiling, values=True)

    _stream_cache(gmem.block_table, bars.v_free, copy, walk, tiling)


def _stream_cache(
    block_table: Any,
    free: Any,
    copy: Callable[[jax.Array, jax.Array, pages.Chunks], None],
    walk: Walk,
    tiling: TensorTiling,
) -> None:
    """Calls copy(KV tiles before, kv head, chunks) for each KV tile of a CTA once its stage is free.

    The page ids are asked for before that, so that they are there when it is.
    """
    stages = tiling.num_stages

    def wait_until_free(count: jax.Array) -> None:
        stage = work_loop.stage_of(count, tiling)
        pl.when(count >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))

    def copy_tile(tile: Tile, done: jax.Array) -> None:
        @pl.loop(tile.piece.first_tile, tile.end)
        def _(t: jax.Array) -> None:
            count = done + t - tile.piece.first_tile
            chunks = pages.find_chunks(block_table, tile.piece, t, tiling)
            wait_until_free(count)
            copy(count, tile.piece.head, chunks)

    total = walk.for_each_tile(tiling, copy_tile)
    for i in range(stages):  # A CTA must not end before the tensor core has last arrived.
        wait_until_free(total + i)


def stream_bias(gmem: Gmem, smem: Smem, bars: Barriers, walk: Walk, tiling: TensorTiling) -> None:
    """Copies bias blocks. Arrives on band_ready, waits on band_free."""

    def copy_tile(tile: Tile, done: jax.Array) -> None:
        @pl.loop(tile.first_biased, tile.end)
        def _(t: jax.Array) -> None:
            count = done + t - tile.piece.first_tile
            slot = tiling.band_slot(count)
            for w in tiling.warpgroups_of(count):
                index = slot * WARPGROUPS + w
                plgpu.barrier_wait(bars.band_free.at[index])
                rows = work_loop.rows_of(tile, w, tiling)
                bias.fetch_block(gmem.rel_logits, smem.band.at[slot, w], bars.band_ready.at[index], rows, t, tiling)

    walk.for_each_tile(tiling, copy_tile)
    if tiling.interpret:
        for index in range(tiling.band_slots * WARPGROUPS):
            plgpu.barrier_wait(bars.band_free.at[index])
