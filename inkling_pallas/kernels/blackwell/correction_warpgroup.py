"""The correcting warpgroup of the kernel for sm_100: rescales sums as the softmax moves on, and writes results.

The only writer of its outputs. It clears dead rows of V, too, since it has the time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels.blackwell import work_loop
from inkling_pallas.kernels.blackwell.scratch import Barriers, Results, Smem, Tmem
from inkling_pallas.kernels.blackwell.tiling import TensorTiling
from inkling_pallas.kernels.blackwell.work_loop import Walk
from inkling_pallas.kernels.mosaic import tmem_rows
from inkling_pallas.kernels.phases import epilogue, pages, softmax
from inkling_pallas.kernels.schedule import split_kv, tile_list
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tile_list import Tile
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS

_COLUMNS = 32  # of the sums at a time, which leaves registers to the softmax


def correct(results: Results, smem: Smem, tmem: Tmem, bars: Barriers, walk: Walk, tiling: TensorTiling) -> None:
    """Corrects and writes the rows of each tile of a CTA; `scratch` says what it waits for."""
    for w in range(WARPGROUPS):
        plgpu.barrier_arrive(bars.note_free.at[w])

    def finish(tile: Tile, done: jax.Array) -> None:
        first = tile.piece.first_tile

        @pl.loop(first, tile.end)
        def _(t: jax.Array) -> None:
            _clear_dead_keys(smem, bars, tile, t, work_loop.stage_of(done + t - first, tiling), tiling)
            for w in tiling.warpgroups_of(done + t - first):
                _rescale(smem, tmem, bars, w, t >= first + tiling.stride, tiling)

        if tiling.splits:
            _write_piece(results, smem, tmem, bars, tile, done, walk.cta, tiling)
        else:
            for w in range(WARPGROUPS):
                _write_rows(results, smem, tmem, bars, w, work_loop.rows_of(tile, w, tiling), tiling)

    walk.for_each_tile(tiling, finish)
    epilogue.clear_unowned_rows(results.out, results.lse, walk.table, walk.cta, tiling)


def _clear_dead_keys(
    smem: Smem, bars: Barriers, tile: Tile, t: jax.Array, stage: jax.Array, tiling: TensorTiling
) -> None:
    """Clears the V rows that no row of the sequence sees, in the few tiles that have some."""
    plgpu.barrier_wait(bars.v_ready.at[stage])
    begin, end = tile_list.clean_rows_of(tile, t, tiling)

    @pl.when((begin > 0) | (end < tiling.block_kv))
    def _() -> None:
        pages.clear_dead_rows(smem.v.at[stage], begin, end, tiling)
        plgpu.barrier_arrive(bars.v_clear.at[stage])


def _rescale(smem: Smem, tmem: Tmem, bars: Barriers, w: Any, has_sums: jax.Array, tiling: TensorTiling) -> None:
    """Multiplies the sums of a warpgroup's rows by their decay, where one is less than 1."""
    (decay,) = _take_note(smem, bars, w, 1)

    @pl.when(has_sums)
    def _() -> None:
        plgpu.barrier_wait(bars.o_done.at[w])

        @pl.when(tmem_rows.any_below_one(decay, interpret=tiling.interpret))
        def _() -> None:
            for columns in _columns(tiling):
                tmem_rows.multiply(tmem.sums.at[w, :, columns], decay, interpret=tiling.interpret)

    plgpu.commit_tmem()
    plgpu.barrier_arrive(bars.o_ready.at[w])


def _take_note(smem: Smem, bars: Barriers, w: Any, words: int) -> list[jax.Array]:
    plgpu.barrier_wait(bars.note_ready.at[w])
    note = [plgpu.load(smem.notes.at[w, i], layout=tmem_rows.ROWS) for i in range(words)]
    plgpu.barrier_arrive(bars.note_free.at[w])
    return note


def _columns(tiling: TensorTiling) -> list[slice]:
    return [slice(first, first + _COLUMNS) for first in range(0, tiling.problem.head_dim, _COLUMNS)]


def _write_rows(
    results: Results, smem: Smem, tmem: Tmem, bars: Barriers, w: int, piece: Piece, tiling: TensorTiling
) -> None:
    """Writes the live rows of a warpgroup."""
    weight, reference = _take_note(smem, bars, w, 2)
    plgpu.barrier_wait(bars.o_done.at[w])
    scale, lse_log2 = softmax.scale_and_lse(weight, reference)

    def values(columns: slice) -> jax.Array:
        return tmem_rows.load(tmem.sums.at[w, :, columns]) * softmax.along_rows(scale, _COLUMNS)

    row_of = functools.partial(split_kv.output_row, tiling, piece)
    _store(results.out, results.lse, values, lse_log2 * softmax.LN_2, row_of, piece, tiling)


def _store(
    out: Any,
    lse: Any,
    values: Callable[[slice], jax.Array],
    lse_values: jax.Array,
    row_of: Callable[[Any], Any],
    piece: Piece,
    tiling: TensorTiling,
) -> None:
    """Writes the live rows, some columns at a time."""
    live = piece.tokens * tiling.problem.group
    for columns in _columns(tiling):
        epilogue.store_lanes(out, values(columns), columns.start, row_of, live, tiling)
    if lse is not None:
        epilogue.store_scalars(lse, lse_values, row_of, live, tiling, tmem_rows.ROWS)


def _write_piece(
    results: Results,
    smem: Smem,
    tmem: Tmem,
    bars: Barriers,
    tile: Tile,
    done: jax.Array,
    cta: jax.Array,
    tiling: TensorTiling,
) -> None:
    """Merges both warpgroups' rows; writes a whole unit to the outputs, and part of one to its slot."""
    piece = tile.piece
    notes = [_take_note(smem, bars, w, 2) for w in range(WARPGROUPS)]
    for w in range(WARPGROUPS):
        pl.when(work_loop.takes_part(tile, done, w, tiling))(lambda w=w: plgpu.barrier_wait(bars.o_done.at[w]))
    top = jnp.maximum(notes[0][1], notes[1][1])
    shares = [jnp.exp2(reference - softmax.finite(top)) for _, reference in notes]
    scale, lse_log2 = softmax.scale_and_lse(notes[0][0] * shares[0] + notes[1][0] * shares[1], top)

    def merged(columns: slice) -> jax.Array:
        terms = []
        for w, share in enumerate(shares):
            factor = softmax.along_rows(share * scale, _COLUMNS)
            # Sums that were never written may be NaN.
            sums = tmem_rows.load(tmem.sums.at[w, :, columns])
            terms.append(jnp.where(factor > 0, sums * factor, jnp.zeros_like(sums)))
        return terms[0] + terms[1]

    row_of = functools.partial(split_kv.output_row, tiling, piece)
    whole = (piece.begin == 0) & (piece.end == piece.tiles)
    lse = lse_log2 * softmax.LN_2
    pl.when(whole)(lambda: _store(results.out, results.lse, merged, lse, row_of, piece, tiling))
    if not tiling.whole_units:
        slot = split_kv.slot_of(cta, piece.end == piece.tiles) * tiling.rows
        parts = (results.part_out, results.part_lse, merged, lse_log2, lambda row: slot + row)
        pl.when(jnp.logical_not(whole))(lambda: _store(*parts, piece, tiling))
