"""Merges what the CTAs of a cluster found for one unit, through each other's shared memory.

Each CTA sends the others their elements of its rows, waits for theirs, and writes its elements of the result: no
partial result leaves the chip, and no second kernel starts. The interpreter, where a CTA does not see another one's
shared memory, sends by global memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.integers import rem
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.hopper.decode_scratch import Barriers, Results, Smem
from inkling_pallas.kernels.phases import epilogue, softmax
from inkling_pallas.kernels.schedule import split_kv
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tiling import Tiling


def merge(
    results: Results, smem: Smem, bars: Barriers, state: softmax.State, piece: Piece, cta: jax.Array, tiling: Tiling
) -> None:
    """Merges a unit and writes it. Arrives on parts_ready and waits on it."""
    rows, lse_log2 = softmax.finish(state)
    rank = rem(cta, tiling.ranks)
    if tiling.interpret:
        live, first = jnp.int32(tiling.rows), cta * tiling.rows
        epilogue.store_columns(results.part_out, rows, lambda r: first + r, live, tiling)
        epilogue.store_scalars(results.part_lse, lse_log2, lambda r: first + r, live, tiling)
        plgpu.barrier_arrive(bars.parts_ready)
        plgpu.barrier_wait(bars.parts_ready)
    else:
        mosaic.exchange(smem.parts_barrier, smem.parts, smem.part_lses, rows, lse_log2, rank)
    _write(results, *_merge_parts(results, smem, cta, tiling), piece, rank, tiling)


def _layout(tiling: Tiling) -> Any:
    return mosaic.strided((tiling.rank_width, tiling.columns))


def _merge_parts(results: Results, smem: Smem, cta: jax.Array, tiling: Tiling) -> tuple[jax.Array, jax.Array]:
    """Returns this CTA's elements of the merged rows and their log-sum-exp, [rank_width, columns] both."""
    layout, shape = _layout(tiling), (tiling.rank_width, tiling.columns)
    parts = _parts_interpreted(results, cta, tiling) if tiling.interpret else _parts_received(smem, tiling)
    zero = mosaic.full(shape, 0.0, jnp.float32, layout)
    start = softmax.Merged(zero, mosaic.full(shape, -jnp.inf, jnp.float32, layout), zero)
    return softmax.finish_merge(softmax.merge(start, [value for value, _ in parts], [lse for _, lse in parts]))


def _parts_received(smem: Smem, tiling: Tiling) -> list[tuple[jax.Array, jax.Array]]:
    """Returns (values, log-sum-exp) of each CTA, [rank_width, columns] both, from this one's shared memory."""
    layout, shape = _layout(tiling), (tiling.rank_width, tiling.columns)
    element, column = (mosaic.iota(shape, axis, layout) for axis in (0, 1))

    def part(i: int) -> tuple[jax.Array, jax.Array]:
        value = mosaic.gather(smem.parts, element + i * tiling.rank_width, column, layout=layout, interpret=False)
        lse = mosaic.gather(smem.part_lses, jnp.full_like(column, i), column, layout=layout, interpret=False)
        return value, lse

    return [part(i) for i in range(tiling.ranks)]


def _parts_interpreted(results: Results, cta: jax.Array, tiling: Tiling) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the same from global memory."""
    shape, rank = (tiling.rank_width, tiling.columns), rem(cta, tiling.ranks)
    element, column = (mosaic.iota(shape, axis, _layout(tiling)) for axis in (0, 1))
    of_cluster = pl.ds((cta - rank) * tiling.rows, tiling.ranks * tiling.rows)
    values, lses = results.part_out[of_cluster], results.part_lse[of_cluster]

    def part(i: int) -> tuple[jax.Array, jax.Array]:
        row = i * tiling.rows + jnp.minimum(column, tiling.rows - 1)
        return values[row, rank * tiling.rank_width + element], lses[row, jnp.zeros_like(row)]

    return [part(i) for i in range(tiling.ranks)]


def _write(
    results: Results, value: jax.Array, lse_log2: jax.Array, piece: Piece, rank: jax.Array, tiling: Tiling
) -> None:
    live = piece.tokens * tiling.problem.group

    def row_of(row: Any) -> Any:
        return split_kv.output_row(tiling, piece, row)

    first = rank * tiling.rank_width
    epilogue.store_part_of_columns(results.out, value, first, row_of, live, _layout(tiling), tiling)
    if results.lse is not None:
        alone = jnp.where(rank == 0, live, 0)
        lse = lse_log2 * softmax.LN_2
        epilogue.store_column_scalars(results.lse, lse, row_of, alone, _layout(tiling), tiling)
