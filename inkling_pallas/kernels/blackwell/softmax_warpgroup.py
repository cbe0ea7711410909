"""A softmax warpgroup of the kernel for sm_100: scores from tensor memory, with their bias, to weights in it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.integers import div, rem
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.blackwell import work_loop
from inkling_pallas.kernels.blackwell.scratch import Barriers, Smem, Tmem
from inkling_pallas.kernels.blackwell.tiling import TensorTiling
from inkling_pallas.kernels.blackwell.work_loop import Walk
from inkling_pallas.kernels.mosaic import tmem_rows, wgmma_rows
from inkling_pallas.kernels.mosaic.tmem_rows import LANES
from inkling_pallas.kernels.phases import bias, pages, softmax
from inkling_pallas.kernels.phases.operands import Gmem
from inkling_pallas.kernels.schedule import split_kv, tile_list
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tile_list import Tile
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS


class _State(NamedTuple):
    """What is known of 128 query rows after some keys, but for their sums. float32[128]."""

    reference_log2: jax.Array  # what their weights are relative to
    weight: jax.Array


class _Work(NamedTuple):
    """A tile, the KV tiles that its CTA had before, and the rows of it that a warpgroup has."""

    tile: Tile
    done: jax.Array
    rows: Piece
    warpgroup: jax.Array

    def count(self, t: jax.Array) -> jax.Array:
        """Returns how many KV tiles the CTA had before KV tile t."""
        return self.done + t - self.tile.piece.first_tile


def weigh_rows(
    gmem: Gmem, smem: Smem, tmem: Tmem, bars: Barriers, warpgroup: jax.Array, walk: Walk, tiling: TensorTiling
) -> None:
    """Weighs the keys of a warpgroup's rows of each tile; `scratch` says what it waits for."""
    for slot in range(tiling.band_slots):
        plgpu.barrier_arrive(bars.band_free.at[slot * WARPGROUPS + warpgroup])

    def weigh(tile: Tile, done: jax.Array) -> None:
        work = _Work(tile, done, work_loop.rows_of(tile, warpgroup, tiling), warpgroup)

        @pl.when(work_loop.takes_part(tile, done, warpgroup, tiling))
        def _() -> None:
            _stage_queries(gmem.q, smem.q.at[warpgroup], work.rows, tiling)
            plgpu.barrier_arrive(bars.q_ready.at[warpgroup])

        state = _weigh_keys(smem, tmem, bars, work, tiling)
        _pass_note(smem, bars, warpgroup, state.weight, state.reference_log2)

    walk.for_each_tile(tiling, weigh)
    if tiling.interpret:  # It wants every completion of a barrier to be seen.
        plgpu.barrier_wait(bars.note_free.at[warpgroup])


def _stage_queries(q: Any, operand: Any, piece: Piece, tiling: TensorTiling) -> None:
    """Lays query rows out as a matrix operand, scaled if that is exact.

    Rows past the sequence are of the next one or the last of the array.
    """
    problem = tiling.problem
    shape = (LANES, problem.head_dim)
    layout = mosaic.strided(shape, 8)
    row, element = (mosaic.iota(shape, axis, layout) for axis in (0, 1))
    place = split_kv.output_row(tiling, piece, jnp.minimum(row, tiling.rows - 1))
    place = jnp.minimum(place, problem.num_tokens * problem.num_heads - 1)
    queries = mosaic.gather(q, place, element, layout=layout, vectors="neighbours", interpret=tiling.interpret)
    if tiling.scales_queries:
        queries = (queries.astype(jnp.float32) * problem.softmax_scale).astype(queries.dtype)
    mosaic.store_operand(operand, queries, layout=layout, interpret=tiling.interpret)
    plgpu.commit_smem()


def _weigh_keys(smem: Smem, tmem: Tmem, bars: Barriers, work: _Work, tiling: TensorTiling) -> _State:
    """Returns the state of a warpgroup's rows after the KV tiles of its tile, band by band."""
    bands = tile_list.bands_of(work.tile, work.rows, tiling)
    state = _State(
        reference_log2=mosaic.full((LANES,), -jnp.inf, jnp.float32, tmem_rows.ROWS),
        weight=mosaic.full((LANES,), 0.0, jnp.float32, tmem_rows.ROWS),
    )

    def walk(begin: jax.Array, end: jax.Array, state: _State, **sides: bool) -> _State:
        if tiling.splits:  # Up to the first KV tile of this warpgroup.
            begin = begin + rem(work.count(begin) + work.warpgroup, WARPGROUPS)

        def step(i: jax.Array, state: _State) -> _State:
            return _weigh_tile(smem, tmem, bars, state, work, begin + i * tiling.stride, tiling, **sides)

        return lax.fori_loop(0, div(end - begin + (tiling.stride - 1), tiling.stride), step, state)

    if tiling.problem.window_left is None:
        state = walk(bands.first, bands.biased, state)
    else:  # A tile at the left edge of a window may be at the right edge of the keys, too.
        state = walk(bands.first, bands.edge_end, state, biased=True, left=True, right=True)
    state = walk(bands.biased, bands.diagonal, state, biased=True)
    return walk(bands.diagonal, bands.end, state, biased=True, right=True)


def _weigh_tile(
    smem: Smem,
    tmem: Tmem,
    bars: Barriers,
    state: _State,
    work: _Work,
    t: jax.Array,
    tiling: TensorTiling,
    *,
    biased: bool = False,
    left: bool = False,
    right: bool = False,
) -> _State:
    """Returns the state after KV tile t, whose weights it leaves in tensor memory and whose decay in a note."""
    w = work.warpgroup
    plgpu.barrier_wait(bars.s_ready.at[w])
    scores = tmem_rows.load(tmem.scores.at[w])
    if not tiling.scales_queries:
        scores = scores * tiling.problem.softmax_scale
    if biased:
        scores = scores + _read_bias(smem, bars, work, t, tiling)
    absent = pages.absent_chunks(smem.absent, (0, tiling.note_slot(work.count(t))), tiling)
    scores = lax.cond(absent != 0, lambda: _mask_absent(scores, absent, tiling), lambda: scores)
    scores = _mask(scores, work.rows, t, left, right, tiling)
    reference, decay, weights = softmax.weigh_rows_lazily(state.reference_log2, scores, tiling.problem.dtype)
    _pass_note(smem, bars, w, decay)
    plgpu.async_store_tmem(tmem.weights.at[w], weights.astype(jnp.dtype(tiling.problem.dtype)))
    plgpu.commit_tmem()
    plgpu.barrier_arrive(bars.p_ready.at[w])
    return _State(reference, state.weight * decay + weights.sum(axis=1))


def _read_bias(smem: Smem, bars: Barriers, work: _Work, t: jax.Array, tiling: TensorTiling) -> jax.Array:
    """Returns the bias of a score tile. Waits on band_ready, arrives on band_free."""
    slot = tiling.band_slot(work.count(t))
    index = slot * WARPGROUPS + work.warpgroup
    plgpu.barrier_wait(bars.band_ready.at[index])
    values = bias.read_lanes(smem.band.at[slot, work.warpgroup], work.rows, tiling)
    wgmma_rows.release_reads(interpret=tiling.interpret)
    plgpu.barrier_arrive(bars.band_free.at[index])
    return values.astype(jnp.float32)


def _mask_absent(scores: jax.Array, absent: jax.Array, tiling: TensorTiling) -> jax.Array:
    """Returns the scores masked at the keys of page ids outside the pool."""
    key = mosaic.iota(scores.shape, 1, tmem_rows.NATIVE)
    return softmax.mask_chunks(scores, div(key, tiling.chunk), absent)


def _mask(scores: jax.Array, piece: Piece, t: jax.Array, left: bool, right: bool, tiling: TensorTiling) -> jax.Array:
    """Returns the scores with -inf at keys that a row does not see, on the sides asked for."""
    position = piece.first_pos + tiling.token_of(mosaic.iota((LANES,), 0, tmem_rows.ROWS))
    first_key, window_left = t * tiling.block_kv, tiling.problem.window_left
    key = mosaic.iota(scores.shape, 1, tmem_rows.NATIVE)
    nothing = jnp.full_like(scores, -jnp.inf)
    if right:
        end = jnp.minimum(position + 1, piece.kv_len) - first_key
        scores = jnp.where(key < softmax.along_rows(end, scores.shape[1]), scores, nothing)
    if left and window_left is not None:
        begin = position - window_left - first_key
        scores = jnp.where(key >= softmax.along_rows(begin, scores.shape[1]), scores, nothing)
    return scores


def _pass_note(smem: Smem, bars: Barriers, warpgroup: jax.Array, *words: jax.Array) -> None:
    """Leaves words for each row: the decay of a KV tile; at the end of a tile the weight and the reference."""
    plgpu.barrier_wait(bars.note_free.at[warpgroup])
    for i, word in enumerate(words):
        smem.notes[warpgroup, i] = word
    plgpu.barrier_arrive(bars.note_ready.at[warpgroup])
