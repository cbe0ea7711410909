"""The walk of a compute warpgroup over the KV tiles of a tile, one product ahead of its softmax.

With K of KV tile t goes V of tile t - 1: both products are issued at once, and the softmax of tile t runs beside the
second. What a step hands to the next is the weights of its tile, which have met no values yet.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels.hopper import prefill_mainloop
from inkling_pallas.kernels.hopper.prefill_mainloop import Work
from inkling_pallas.kernels.hopper.prefill_scratch import Barriers, Smem
from inkling_pallas.kernels.mosaic import wgmma_rows
from inkling_pallas.kernels.phases import pages, softmax
from inkling_pallas.kernels.schedule import tile_list
from inkling_pallas.kernels.schedule.tiling import RowTiling


class _Ahead(NamedTuple):
    """The state of some rows, and the weights of the last KV tile, 16-bit[64, block_kv], whose values it lacks."""

    state: softmax.RowState
    weights: jax.Array


def attend_tile(smem: Smem, bars: Barriers, work: Work, tiling: RowTiling) -> softmax.RowState:
    """Returns the softmax state of a warpgroup's rows after the KV tiles of its tile."""
    bands = tile_list.bands_of(work.tile, work.rows, tiling)
    windowed = tiling.problem.window_left is not None
    queries = prefill_mainloop.read_queries(smem, bars, work, tiling)
    ahead = _first_step(smem, bars, queries, work, bands, tiling)

    def walk(begin: jax.Array, end: jax.Array, ahead: _Ahead, **sides: bool) -> _Ahead:
        def step(t: jax.Array, ahead: _Ahead) -> _Ahead:
            return _step(smem, bars, queries, ahead, work, t, tiling, **sides)

        return lax.fori_loop(jnp.maximum(begin, bands.first + 1), end, step, ahead)

    if windowed:
        ahead = walk(bands.first, bands.edge_end, ahead, biased=True, left=True, right=True)
    else:
        ahead = walk(bands.first, bands.biased, ahead)
    ahead = walk(bands.biased, bands.diagonal, ahead, biased=True)
    ahead = walk(bands.diagonal, bands.end, ahead, biased=True, right=True)
    return _last_product(smem, bars, ahead, work, tiling)


def _first_step(
    smem: Smem, bars: Barriers, queries: jax.Array, work: Work, bands: tile_list.Bands, tiling: RowTiling
) -> _Ahead:
    """Returns the weights of the first KV tile, whatever its band. Takes a turn for its scores."""
    stage = work.stage(bands.first, tiling)
    plgpu.barrier_wait(bars.k_ready.at[stage])
    absent = pages.absent_chunks(smem.absent, (0, stage), tiling)
    pl.when(work.warpgroup == 1)(lambda: prefill_mainloop.take_turn(work, tiling))
    scores, _ = wgmma_rows.scores_of(
        queries,
        smem.k.at[stage],
        start=None,
        meanwhile=lambda: prefill_mainloop.pass_turn(work, tiling),
        interpret=tiling.interpret,
    )
    plgpu.barrier_arrive(bars.k_free.at[stage])
    windowed = tiling.problem.window_left is not None

    def with_bias() -> jax.Array:
        return _finish_scores(smem, bars, scores, absent, work, bands.first, tiling, biased=True)

    def without() -> jax.Array:
        return _finish_scores(smem, bars, scores, absent, work, bands.first, tiling)

    scores = with_bias() if windowed else lax.cond(bands.first >= bands.biased, with_bias, without)
    scores = prefill_mainloop.mask(scores, work.rows, bands.first, windowed, True, tiling)
    state = prefill_mainloop.no_keys(tiling)
    after, reference, decay = _weigh(state.reference_log2, scores, absent, tiling)
    weights = softmax.row_weights(scores, reference)
    state = state._replace(reference_log2=after, weight=softmax.add_weights(state.weight, decay, weights))
    return _Ahead(state, weights.astype(jnp.dtype(tiling.problem.dtype)))


def _finish_scores(
    smem: Smem,
    bars: Barriers,
    scores: jax.Array,
    absent: jax.Array,
    work: Work,
    t: jax.Array,
    tiling: RowTiling,
    *,
    biased: bool = False,
) -> jax.Array:
    """Returns scores in natural units, with their bias if they have one."""
    if not tiling.scales_queries:
        scores = scores * tiling.problem.softmax_scale
    if not _is_whole(tiling):
        scores = prefill_mainloop.drop_absent(scores, absent, tiling)
    return scores + prefill_mainloop.read_bias(smem, bars, work, t, tiling) if biased else scores


def _is_whole(tiling: RowTiling) -> bool:
    """True if a KV tile lies in one page, so that all of its keys are there or none is."""
    return tiling.chunk == tiling.block_kv


def _weigh(
    reference_log2: jax.Array, scores: jax.Array, absent: jax.Array, tiling: RowTiling
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what weights are relative to after a tile, what this tile's are, and how much earlier ones decay.

    No branch masks an absent tile, which would part the scores from what is done with them: its scores are taken for
    -inf, and its weights are relative to +inf.
    """
    top = scores.max(axis=1)
    if not _is_whole(tiling):
        return softmax.raise_reference(reference_log2, top, tiling.problem.dtype)
    far = jnp.where(absent != 0, jnp.float32(jnp.inf), jnp.float32(0.0))
    after, reference, decay = softmax.raise_reference(reference_log2, top - far, tiling.problem.dtype)
    return after, reference + far, decay


def _step(
    smem: Smem,
    bars: Barriers,
    queries: jax.Array,
    ahead: _Ahead,
    work: Work,
    t: jax.Array,
    tiling: RowTiling,
    *,
    biased: bool = False,
    left: bool = False,
    right: bool = False,
) -> _Ahead:
    """Returns the state with the values of KV tile t - 1 and the weights of tile t.

    Waits on k_ready of t and v_ready of t - 1; takes a turn for both products; frees both.
    """
    state, stage, before = ahead.state, work.stage(t, tiling), work.stage(t - 1, tiling)
    plgpu.barrier_wait(bars.k_ready.at[stage])
    plgpu.barrier_wait(bars.v_ready.at[before])
    if biased:  # No row of the tiles before those is dead.
        prefill_mainloop.clear_dead_keys(smem, bars, work, t - 1, tiling)
    prefill_mainloop.take_turn(work, tiling)

    def issued() -> jax.Array:
        prefill_mainloop.pass_turn(work, tiling)
        return pages.absent_chunks(smem.absent, (0, stage), tiling)

    def absorb(scores: jax.Array, absent: jax.Array) -> tuple[jax.Array, ...]:
        plgpu.barrier_arrive(bars.k_free.at[stage])
        scores = _finish_scores(smem, bars, scores, absent, work, t, tiling, biased=biased)
        scores = prefill_mainloop.mask(scores, work.rows, t, left, right, tiling)
        after, reference, decay = _weigh(state.reference_log2, scores, absent, tiling)
        wgmma_rows.stay_before(decay, interpret=tiling.interpret)
        return after, reference, decay, scores

    acc, (after, reference, decay, scores) = wgmma_rows.both_products(
        queries,
        smem.k.at[stage],
        state.acc,
        ahead.weights,
        smem.v.at[before],
        issued=issued,
        absorb=absorb,
        interpret=tiling.interpret,
    )
    plgpu.barrier_arrive(bars.v_free.at[before])
    # One stretch of code: what the exponentials leave of issue slots goes to the rescaling and the rounding.
    weights = softmax.row_weights(scores, reference)
    sums = softmax.add_weights(state.weight, decay, weights)
    acc = wgmma_rows.rescale(acc, decay, interpret=tiling.interpret)
    return _Ahead(softmax.RowState(acc, after, sums), weights.astype(ahead.weights.dtype))


def _last_product(smem: Smem, bars: Barriers, ahead: _Ahead, work: Work, tiling: RowTiling) -> softmax.RowState:
    """Returns the state with the values of the last KV tile. Takes a turn for them."""
    state, t = ahead.state, work.tile.end - 1
    stage = work.stage(t, tiling)
    plgpu.barrier_wait(bars.v_ready.at[stage])
    prefill_mainloop.clear_dead_keys(smem, bars, work, t, tiling)
    prefill_mainloop.take_turn(work, tiling)

    def issued(weight: jax.Array) -> jax.Array:
        pl.when(work.warpgroup == 0)(lambda: prefill_mainloop.pass_turn(work, tiling))
        return weight

    acc, weight = wgmma_rows.add_product(
        state.acc, ahead.weights, smem.v.at[stage], state.weight, issued, interpret=tiling.interpret
    )
    plgpu.barrier_arrive(bars.v_free.at[stage])
    return state._replace(acc=acc, weight=weight)
