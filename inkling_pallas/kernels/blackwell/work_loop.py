"""Which tiles a CTA of the kernel for sm_100 attends: those of the list, or the pieces of its share of the line."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.integers import rem
from inkling_pallas.kernels.blackwell.tiling import TensorTiling
from inkling_pallas.kernels.schedule import split_kv, tile_list
from inkling_pallas.kernels.schedule.seq_table import Table, reader
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tile_list import Counts, Tile, Worklist
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS


class Walk(NamedTuple):
    """What a CTA walks."""

    cta: jax.Array
    work: Worklist | None  # None: the line that the table describes
    table: Table

    def for_each_tile(self, tiling: TensorTiling, body: Callable[[Tile, jax.Array], None]) -> jax.Array:
        """Calls body(tile, KV tiles before it) for each tile and returns the number of KV tiles."""
        if self.work is not None:

            def attend(tile: Tile, counts: Counts) -> None:
                body(tile, counts.kv_tiles)

            return tile_list.for_each_tile(self.work, self.cta, tiling, attend).kv_tiles

        def attend_piece(index: jax.Array, done: jax.Array, piece: Piece) -> None:
            del index
            begin, end = split_kv.live_keys(
                piece.kv_len, piece.tokens, piece.first_pos, window_left=tiling.problem.window_left
            )
            own = piece._replace(first_tile=piece.first_tile + piece.begin)
            body(tile_list.tile_from(own, begin, end, tiling), done)

        return split_kv.for_each_piece(self.table, self.cta, tiling, attend_piece).tiles


def make(gmem: Any, smem: Any, bars: Any, cta: jax.Array, tiling: TensorTiling, *, fills: bool = False) -> Walk:
    """Returns the walk of a CTA. Without a list one warpgroup, which `fills`, makes the table for all."""
    if not tiling.splits:
        return Walk(cta, gmem.plan, tile_list.table_of(gmem.plan.table))
    if fills:
        table = split_kv.fill_table(gmem.plan, smem.table, tiling)
        plgpu.barrier_arrive(bars.table_ready)
        return Walk(cta, None, table)
    plgpu.barrier_wait(bars.table_ready)
    return Walk(cta, None, reader(smem.table, tiling))


def rows_of(tile: Tile, warpgroup: Any, tiling: TensorTiling) -> Piece:
    """Returns the rows that a warpgroup has of a tile; maybe none of them is live."""
    return tile.piece if tiling.splits else tile_list.rows_of(tile, 0, warpgroup, tiling)


def takes_part(tile: Tile, done: jax.Array, warpgroup: Any, tiling: TensorTiling) -> Any:
    """Returns whether a warpgroup has KV tiles of a tile: by turns, one of them has none of a single one."""
    return not tiling.splits or (tile.end > tile.piece.first_tile + 1) | (rem(done, WARPGROUPS) == warpgroup)


def stage_of(count: Any, tiling: TensorTiling) -> jax.Array:
    """Returns where in the ring K and V of a KV tile are, by how many the CTA had before."""
    return rem(count, tiling.num_stages)
