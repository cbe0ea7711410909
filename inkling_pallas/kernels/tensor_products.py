"""The warp of the kernel for sm_100 that issues matrix products: scores into tensor memory, weights times values."""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels import worklist
from inkling_pallas.kernels.prefill_buffers import Gmem
from inkling_pallas.kernels.tensor_buffers import Barriers, Smem, Tmem
from inkling_pallas.kernels.tensor_tiling import TensorTiling
from inkling_pallas.kernels.tiling import WARPGROUPS
from inkling_pallas.kernels.worklist import Counts, Tile


def issue_products(
    gmem: Gmem, smem: Smem, tmem: Tmem, bars: Barriers, cta: jax.Array, tiling: TensorTiling
) -> None:
    """Issues the products of each tile of a CTA; `tensor_buffers` says what it waits for."""

    def multiply(tile: Tile, counts: Counts) -> None:
        first = tile.piece.first_tile

        def stage(t: jax.Array) -> jax.Array:
            return lax.rem(counts.kv_tiles + t - first, tiling.num_stages)

        plgpu.barrier_wait(bars.k_ready.at[stage(first)])
        for w in range(WARPGROUPS):
            plgpu.barrier_wait(bars.q_ready.at[w])
            _issue_scores(smem, tmem, bars, w, stage(first))

        @pl.loop(first, tile.end)
        def _(t: jax.Array) -> None:
            plgpu.barrier_wait(bars.v_ready.at[stage(t)])
            begin, end = worklist.clean_rows_of(tile, t, tiling)
            dirty = (begin > 0) | (end < tiling.block_kv)
            pl.when(dirty)(lambda: plgpu.barrier_wait(bars.v_clear.at[stage(t)]))
            for w in range(WARPGROUPS):
                _issue_sums(smem, tmem, bars, w, stage(t), t > first)

                @pl.when(t + 1 < tile.end)
                def _(w: int = w) -> None:
                    if w == 0:
                        plgpu.barrier_wait(bars.k_ready.at[stage(t + 1)])
                    _issue_scores(smem, tmem, bars, w, stage(t + 1))

    worklist.for_each_tile(gmem.work, cta, tiling, multiply)


def _issue_scores(smem: Smem, tmem: Tmem, bars: Barriers, w: int, stage: jax.Array) -> None:
    """Issues q @ K.T of a warpgroup; K is free after that of the last one."""
    plgpu.tcgen05_mma(tmem.scores.at[w], smem.q.at[w], smem.k.at[stage].T, accumulate=False)
    plgpu.tcgen05_commit_arrive(bars.s_ready.at[w])  # After all products so far: weights may be overwritten, too.
    if w == WARPGROUPS - 1:
        plgpu.tcgen05_commit_arrive(bars.k_free.at[stage])


def _issue_sums(smem: Smem, tmem: Tmem, bars: Barriers, w: int, stage: jax.Array, accumulate: Any) -> None:
    """Issues weights @ V of a warpgroup once both are ready; V is free after that of the last one."""
    plgpu.barrier_wait(bars.p_ready.at[w])
    plgpu.barrier_wait(bars.o_ready.at[w])
    plgpu.tcgen05_mma(
        tmem.sums.at[w], tmem.weights.at[w], smem.v.at[stage], bars.o_done.at[w], accumulate=accumulate
    )
    if w == WARPGROUPS - 1:
        plgpu.tcgen05_commit_arrive(bars.v_free.at[stage])
