"""The correcting warpgroup of the kernel for sm_100: rescales sums as the softmax moves on, and writes results.

The only writer of its outputs. It clears dead rows of V, too, since it has the time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels import epilogue, lanes, mosaic, pages, schedule, softmax, worklist
from inkling_pallas.kernels.prefill_buffers import Gmem
from inkling_pallas.kernels.schedule import Piece
from inkling_pallas.kernels.tensor_buffers import Barriers, Smem, Tmem
from inkling_pallas.kernels.tensor_tiling import LANES, TensorTiling
from inkling_pallas.kernels.tiling import WARPGROUPS
from inkling_pallas.kernels.worklist import Counts, Tile

_COLUMNS = 32  # of the sums at a time, which leaves registers to the softmax


def correct(
    gmem: Gmem, outputs: Any, smem: Smem, tmem: Tmem, bars: Barriers, cta: jax.Array, tiling: TensorTiling
) -> None:
    """Corrects and writes the rows of each tile of a CTA; `tensor_buffers` says what it waits for."""
    out, lse = outputs

    def finish(tile: Tile, counts: Counts) -> None:
        first = tile.piece.first_tile

        @pl.loop(first, tile.end)
        def _(t: jax.Array) -> None:
            _clear_dead_keys(smem, bars, tile, counts, t, tiling)
            for w in range(WARPGROUPS):
                _rescale(smem, tmem, bars, w, t > first, tiling)

        for w in range(WARPGROUPS):
            _write_rows(out, lse, smem, tmem, bars, w, worklist.rows_of(tile, 0, w, tiling), tiling)

    worklist.for_each_tile(gmem.work, cta, tiling, finish)
    epilogue.clear_unowned_rows(out, lse, worklist.table_of(gmem.work.table), cta, tiling)


def _clear_dead_keys(
    smem: Smem, bars: Barriers, tile: Tile, counts: Counts, t: jax.Array, tiling: TensorTiling
) -> None:
    """Clears the V rows that no row of the sequence sees, in the few tiles that have some."""
    stage = lax.rem(counts.kv_tiles + t - tile.piece.first_tile, tiling.num_stages)
    plgpu.barrier_wait(bars.v_ready.at[stage])
    begin, end = worklist.clean_rows_of(tile, t, tiling)

    @pl.when((begin > 0) | (end < tiling.block_kv))
    def _() -> None:
        pages.clear_dead_rows(smem.v.at[stage], begin, end, tiling)
        plgpu.barrier_arrive(bars.v_clear.at[stage])


def _rescale(smem: Smem, tmem: Tmem, bars: Barriers, w: int, has_sums: jax.Array, tiling: TensorTiling) -> None:
    """Multiplies the sums of a warpgroup's rows by their decay, where one is less than 1."""
    plgpu.barrier_wait(bars.note_ready.at[w])
    decay = plgpu.load(smem.notes.at[w, 0], layout=lanes.ROWS)
    plgpu.barrier_arrive(bars.note_free.at[w])

    @pl.when(has_sums)
    def _() -> None:
        plgpu.barrier_wait(bars.o_done.at[w])

        @pl.when(lanes.any_below_one(decay, interpret=tiling.interpret))
        def _() -> None:
            for column in range(0, tiling.problem.head_dim, _COLUMNS):
                some = tmem.sums.at[w, :, column : column + _COLUMNS]
                lanes.multiply(some, decay, interpret=tiling.interpret)

    plgpu.commit_tmem()
    plgpu.barrier_arrive(bars.o_ready.at[w])


def _write_rows(
    out: Any, lse: Any, smem: Smem, tmem: Tmem, bars: Barriers, w: int, piece: Piece, tiling: TensorTiling
) -> None:
    """Writes the live rows of a warpgroup."""
    plgpu.barrier_wait(bars.note_ready.at[w])
    weight, reference = (plgpu.load(smem.notes.at[w, i], layout=lanes.ROWS) for i in (0, 1))
    plgpu.barrier_arrive(bars.note_free.at[w])
    row = mosaic.iota((LANES,), 0, lanes.ROWS)
    places = jnp.where(row < piece.tokens * tiling.problem.group, schedule.output_row(tiling, piece, row), -1)
    plgpu.barrier_wait(bars.o_done.at[w])
    scale, lse_log2 = softmax.scale_and_lse(weight, reference)
    for column in range(0, tiling.problem.head_dim, _COLUMNS):
        values = lanes.load(tmem.sums.at[w, :, column : column + _COLUMNS]) * softmax.along_rows(scale, _COLUMNS)
        lanes.store_rows(out, places, values.astype(out.dtype), column, interpret=tiling.interpret)
    if lse is not None:
        lanes.store_scalars(lse, places, lse_log2 * softmax.LN_2, interpret=tiling.interpret)
