"""Bias tiles: the block of rel_logits that a KV tile can need. The only reader of rel_logits.

Of a plain table a score tile needs `rel_logits[row, head, first_pos + token - key]`. The block that holds it starts at
a distance rounded down to 8, the alignment that a copy asks for; reading it element by element shifts and reverses it.
Distances before 0 and past the extent are zeros: the copy engine fills them in.

Of a sheared table (`core.sheared_layout`) the block starts at the column of the tile's first key in the row of the
last token, which is a multiple of 8 as it is, and aligned loads read it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.integers import shift_left, shift_right
from inkling_pallas.core.sheared_layout import ShearedLogits, sheared_width, shift_of
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.mosaic import sheared_loads, tmem_rows, wgmma_rows
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tiling import ROWS, RowTiling, Tiling


def pad_for_interpreter(rel_logits: jax.Array | ShearedLogits, tiling: Tiling) -> jax.Array:
    """Returns rel_logits as one array, when interpreting with zeros on the left.

    The interpreter does not fill in what lies before an array.
    """
    array: jax.Array = rel_logits.table if isinstance(rel_logits, ShearedLogits) else rel_logits
    if not tiling.interpret:
        return array
    return jnp.pad(array, ((0, 0), (0, 0), (tiling.band_width, 0)))


def _start(piece: Piece, tile: jax.Array, tiling: Tiling) -> jax.Array:
    """Returns the distance at which the block of a tile starts; of a sheared table the column."""
    if tiling.problem.sheared:
        last = piece.first_pos + (tiling.token_block - 1) - (tiling.problem.rel_extent - 1)
        return tile * tiling.block_kv - shift_left(shift_right(last, 3), 3)
    lowest = piece.first_pos - tile * tiling.block_kv - (tiling.block_kv - 1)
    return shift_left(shift_right(lowest, 3), 3)


def fetch_block(rel_logits: Any, block_smem: Any, ready: Any, piece: Piece, tile: jax.Array, tiling: Tiling) -> None:
    """Starts the copy of the bias block of a tile, [token_block, group, band_width]; it arrives once on `ready`."""
    group, width = tiling.problem.group, tiling.band_width
    # A block wholly outside is zeros wherever it is; keep it near, so that the interpreter's padding can stand for it.
    limit = sheared_width(tiling.problem.rel_extent)
    start = jnp.clip(_start(piece, tile, tiling), -width, limit)
    if tiling.interpret:
        start = start + width
    source = rel_logits.at[pl.ds(piece.row, tiling.token_block), pl.ds(piece.head * group, group), pl.ds(start, width)]
    plgpu.copy_gmem_to_smem(source, block_smem, ready)


def read_tile(block_smem: Any, piece: Piece, tile: jax.Array, tiling: Tiling) -> jax.Array:
    """Returns the bias of a score tile, [block_kv, columns] in the WGMMA layout."""
    if tiling.problem.sheared:
        phase = shift_of(piece.first_pos, tiling.problem.rel_extent)
        shape = (tiling.block_kv, tiling.columns)
        return sheared_loads.load_columns(block_smem, phase, shape, interpret=tiling.interpret)
    row = mosaic.iota((tiling.columns,), 0, mosaic.WGMMA_COLUMNS)
    if tiling.rows < tiling.columns:
        row = jnp.minimum(row, tiling.rows - 1)
    distance_of_key_0 = piece.first_pos - tile * tiling.block_kv - _start(piece, tile, tiling)
    starts = row * tiling.band_width + tiling.token_of(row) + distance_of_key_0
    return mosaic.gather_descending(block_smem, starts, tiling.block_kv, interpret=tiling.interpret)


def read_rows(block_smem: Any, piece: Piece, tile: jax.Array, tiling: RowTiling) -> jax.Array:
    """Returns the bias of a score tile, [64, block_kv] in the WGMMA layout."""
    if tiling.problem.sheared:
        phase = shift_of(piece.first_pos, tiling.problem.rel_extent)
        return sheared_loads.load_rows(block_smem, phase, tiling.block_kv, interpret=tiling.interpret)
    row = mosaic.iota((ROWS,), 0, mosaic.WGMMA_ROWS)
    if tiling.rows < ROWS:
        row = jnp.minimum(row, tiling.rows - 1)
    distance_of_key_0 = piece.first_pos - tile * tiling.block_kv - _start(piece, tile, tiling)
    starts = row * tiling.band_width + tiling.token_of(row) + distance_of_key_0
    return wgmma_rows.gather_descending(block_smem, starts, tiling.block_kv, interpret=tiling.interpret)


def read_lanes(block_smem: Any, piece: Piece, tiling: RowTiling) -> jax.Array:
    """Returns the bias of a score tile, [128, block_kv] in the layout of tensor memory; of a sheared table only."""
    phase = shift_of(piece.first_pos, tiling.problem.rel_extent)
    return tmem_rows.load_rows(block_smem, phase, tiling.block_kv, interpret=tiling.interpret)
