"""The warp of the kernel for sm_100 that issues matrix products: scores into tensor memory, weights times values."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels.blackwell.scratch import Barriers, Smem, Tmem
from inkling_pallas.kernels.blackwell.tiling import TensorTiling
from inkling_pallas.kernels.blackwell.work_loop import Walk, stage_of, takes_part
from inkling_pallas.kernels.schedule import tile_list
from inkling_pallas.kernels.schedule.tile_list import Tile
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS


def issue_products(smem: Smem, tmem: Tmem, bars: Barriers, walk: Walk, tiling: TensorTiling) -> None:
    """Issues the products of each tile of a CTA; `scratch` says what it waits for.

    A warpgroup's next scores are issued right after its sums.
    """

    def multiply(tile: Tile, done: jax.Array) -> None:
        first, stride = tile.piece.first_tile, tiling.stride
        for w in range(WARPGROUPS):
            pl.when(takes_part(tile, done, w, tiling))(lambda w=w: plgpu.barrier_wait(bars.q_ready.at[w]))

        @pl.loop(first, jnp.minimum(first + stride, tile.end))
        def _(t: jax.Array) -> None:
            plgpu.barrier_wait(bars.k_ready.at[stage_of(done + t - first, tiling)])
            for w in tiling.warpgroups_of(done + t - first):
                _issue_scores(smem, tmem, bars, w, stage_of(done + t - first, tiling))
            _free(bars.k_free, done + t - first, tiling)

        @pl.loop(first, tile.end)
        def _(t: jax.Array) -> None:
            count = done + t - first
            _await_values(bars, tile, t, stage_of(count, tiling), tiling)
            more, has_sums = t + stride < tile.end, t >= first + stride
            for i, w in enumerate(tiling.warpgroups_of(count)):
                _issue_sums(smem, tmem, bars, w, stage_of(count, tiling), has_sums)

                @pl.when(more)
                def _(i: int = i, w: Any = w) -> None:
                    if i == 0:
                        plgpu.barrier_wait(bars.k_ready.at[stage_of(count + stride, tiling)])
                    _issue_scores(smem, tmem, bars, w, stage_of(count + stride, tiling))

            _free(bars.v_free, count, tiling)
            pl.when(more)(lambda: _free(bars.k_free, count + stride, tiling))

    walk.for_each_tile(tiling, multiply)


def _await_values(bars: Barriers, tile: Tile, t: jax.Array, stage: jax.Array, tiling: TensorTiling) -> None:
    """Waits for V, and where some of its rows are cleared for that."""
    plgpu.barrier_wait(bars.v_ready.at[stage])
    begin, end = tile_list.clean_rows_of(tile, t, tiling)
    pl.when((begin > 0) | (end < tiling.block_kv))(lambda: plgpu.barrier_wait(bars.v_clear.at[stage]))


def _issue_scores(smem: Smem, tmem: Tmem, bars: Barriers, w: Any, stage: jax.Array) -> None:
    """Issues q @ K.T of a warpgroup."""
    plgpu.tcgen05_mma(tmem.scores.at[w], smem.q.at[w], smem.k.at[stage].T, accumulate=False)
    plgpu.tcgen05_commit_arrive(bars.s_ready.at[w])  # After all products so far: weights may be overwritten, too.


def _issue_sums(smem: Smem, tmem: Tmem, bars: Barriers, w: Any, stage: jax.Array, accumulate: jax.Array) -> None:
    """Issues weights @ V of a warpgroup once both are ready."""
    plgpu.barrier_wait(bars.p_ready.at[w])
    plgpu.barrier_wait(bars.o_ready.at[w])
    values, done = smem.v.at[stage], bars.o_done.at[w]
    plgpu.tcgen05_mma(tmem.sums.at[w], tmem.weights.at[w], values, done, accumulate=accumulate)


def _free(free: Any, count: jax.Array, tiling: TensorTiling) -> None:
    """Lets a stage go once all products issued so far are complete."""
    plgpu.tcgen05_commit_arrive(free.at[stage_of(count, tiling)])
