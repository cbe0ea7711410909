"""What a compute warpgroup of the prefill kernel does with one tile: its walk over the KV tiles, band by band."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.integers import rem
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.hopper import prefill_scratch
from inkling_pallas.kernels.hopper.prefill_scratch import Barriers, Smem
from inkling_pallas.kernels.mosaic import wgmma_rows
from inkling_pallas.kernels.phases import bias, pages, softmax
from inkling_pallas.kernels.schedule import tile_list
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tile_list import Counts, Tile
from inkling_pallas.kernels.schedule.tiling import ROWS, WARPGROUPS, RowTiling

_SUMS = 8  # of the weights of a row, the fewest columns of a register array
_FIRST_TURN = 8  # of four named barriers; Mosaic takes the lower ones


class Work(NamedTuple):
    """A tile, what its CTA did before, and the rows of it that a warpgroup has."""

    tile: Tile
    counts: Counts
    rows: Piece
    warpgroup: jax.Array

    def stage(self, t: jax.Array, tiling: RowTiling) -> jax.Array:
        """Returns where KV tile t is."""
        return rem(self.counts.kv_tiles + t - self.tile.piece.first_tile, tiling.num_stages)

    def band_slot(self, t: jax.Array, tiling: RowTiling) -> jax.Array:
        """Returns where the bias block of KV tile t is; query rows in the ring stand one before the first."""
        return rem(self.counts.slots + tiling.query_items + t - self.tile.first_biased, tiling.band_slots)

    def turn(self, warpgroup: jax.Array) -> jax.Array:
        """Returns the named barrier that a warpgroup waits at for its turn.

        Warpgroup 0 may be a tile ahead of the last turn of warpgroup 1, so tiles alternate between two pairs.
        """
        return _FIRST_TURN + 2 * rem(self.counts.tiles, 2) + warpgroup


def attend_tile(smem: Smem, bars: Barriers, work: Work, tiling: RowTiling) -> softmax.RowState:
    """Returns the softmax state of a warpgroup's rows after the KV tiles of its tile."""
    bands = tile_list.bands_of(work.tile, work.rows, tiling)
    queries = read_queries(smem, bars, work, tiling)
    state = no_keys(tiling)

    def walk(
        begin: jax.Array,
        end: jax.Array,
        state: softmax.RowState,
        *,
        biased: bool,
        left: bool = False,
        right: bool = False,
    ) -> softmax.RowState:
        def step(t: jax.Array, state: softmax.RowState) -> softmax.RowState:
            scores = _scores(smem, bars, queries, work, t, biased, tiling)
            return _absorb(smem, bars, state, mask(scores, work.rows, t, left, right, tiling), work, t, tiling)

        return lax.fori_loop(begin, end, step, state)

    plgpu.barrier_wait(bars.k_ready.at[work.stage(bands.first, tiling)])
    pl.when(work.warpgroup == 1)(lambda: take_turn(work, tiling))
    if tiling.problem.window_left is None:
        state = walk(bands.first, bands.biased, state, biased=False)
    else:  # A tile at the left edge of a window may be at the right edge of the keys, too.
        state = walk(bands.first, bands.edge_end, state, biased=True, left=True, right=True)
    state = walk(bands.biased, bands.diagonal, state, biased=True)
    state = walk(bands.diagonal, bands.end, state, biased=True, right=True)
    pl.when(work.warpgroup == 0)(lambda: pass_turn(work, tiling))
    return state


def no_keys(tiling: RowTiling) -> softmax.RowState:
    """Returns the state of a warpgroup's rows before any key."""
    return softmax.RowState(
        acc=mosaic.full((ROWS, tiling.problem.head_dim), 0.0, jnp.float32, mosaic.WGMMA),
        reference_log2=mosaic.full((ROWS,), -jnp.inf, jnp.float32, mosaic.WGMMA_ROWS),
        weight=mosaic.full((ROWS, _SUMS), 0.0, jnp.float32, mosaic.WGMMA),
    )


def take_turn(work: Work, tiling: RowTiling) -> None:
    """Waits until the other warpgroup has issued its products."""
    wgmma_rows.take_turn(work.turn(work.warpgroup), interpret=tiling.interpret)


def pass_turn(work: Work, tiling: RowTiling) -> None:
    """Lets the other warpgroup issue its products."""
    wgmma_rows.pass_turn(work.turn(1 - work.warpgroup), interpret=tiling.interpret)


def read_queries(smem: Smem, bars: Barriers, work: Work, tiling: RowTiling) -> jax.Array:
    """Returns query rows, [64, head_dim] in the WGMMA layout, scaled if that is exact.

    Waits on band_ready and arrives on band_free where q shares the ring, else on q_ready and q_free.
    """
    slot = rem(work.counts.slots, tiling.band_slots)
    ready, free, index = bars.q_ready, bars.q_free, work.warpgroup
    if tiling.shares_ring:
        ready, free, index = bars.band_ready, bars.band_free, slot * WARPGROUPS + work.warpgroup
    plgpu.barrier_wait(ready.at[index])
    place = prefill_scratch.query_slot(smem, slot, work.warpgroup)
    queries = wgmma_rows.load(place, tiling.rows, tiling.problem.head_dim, interpret=tiling.interpret)
    wgmma_rows.release_reads(interpret=tiling.interpret)
    plgpu.barrier_arrive(free.at[index])
    if not tiling.scales_queries:
        return queries
    return (queries.astype(jnp.float32) * tiling.problem.softmax_scale).astype(queries.dtype)


def _scores(
    smem: Smem, bars: Barriers, queries: jax.Array, work: Work, t: jax.Array, biased: bool, tiling: RowTiling
) -> jax.Array:
    """Returns scores in natural units, [64, block_kv], after passing the turn. K has landed.

    Waits on band_ready, arrives on band_free and k_free.
    """
    stage = work.stage(t, tiling)

    def meanwhile() -> tuple[jax.Array, jax.Array | None]:
        pass_turn(work, tiling)
        absent = pages.absent_chunks(smem.absent, (0, stage), tiling)
        return absent, read_bias(smem, bars, work, t, tiling) if biased else None

    scores, (absent, tile_bias) = wgmma_rows.scores_of(
        queries, smem.k.at[stage], start=None, meanwhile=meanwhile, interpret=tiling.interpret
    )
    plgpu.barrier_arrive(bars.k_free.at[stage])
    if not tiling.scales_queries:
        scores = scores * tiling.problem.softmax_scale
    scores = drop_absent(scores, absent, tiling)
    return scores if tile_bias is None else scores + tile_bias


def read_bias(smem: Smem, bars: Barriers, work: Work, t: jax.Array, tiling: RowTiling) -> jax.Array:
    """Returns the bias of a score tile. Waits on band_ready, arrives on band_free."""
    slot = work.band_slot(t, tiling)
    index = slot * WARPGROUPS + work.warpgroup
    plgpu.barrier_wait(bars.band_ready.at[index])
    values = bias.read_rows(smem.band.at[slot, work.warpgroup], work.rows, t, tiling)
    if tiling.interpret:  # On the card the barrier orders the reads before the next copy, as CUTLASS relies on.
        wgmma_rows.release_reads(interpret=tiling.interpret)
    plgpu.barrier_arrive(bars.band_free.at[index])
    return values.astype(jnp.float32)


def drop_absent(scores: jax.Array, absent: jax.Array, tiling: RowTiling) -> jax.Array:
    """Returns scores before their bias, lowered at keys of absent chunks.

    Without overlap to a finite score, which takes 1.4 % more time than no mask where -inf takes 2.7 % (8,192 tokens of
    a local layer, NVIDIA H200, jax 0.11.2, 2026-12-01).
    """
    value = -math.inf if tiling.overlap else softmax.ABSENT

    def drop(scores: jax.Array) -> jax.Array:
        return wgmma_rows.drop_chunks(scores, absent, tiling.chunk, value, interpret=tiling.interpret)

    return lax.cond(absent != 0, drop, lambda scores: scores, scores)


def mask(scores: jax.Array, piece: Piece, t: jax.Array, left: bool, right: bool, tiling: RowTiling) -> jax.Array:
    """Returns the scores with -inf at keys that a row does not see, on the sides asked for."""
    if not left and not right:
        return scores
    position = piece.first_pos + tiling.token_of(mosaic.iota((ROWS,), 0, mosaic.WGMMA_ROWS))
    first_key, window_left = t * tiling.block_kv, tiling.problem.window_left
    if right:
        end = jnp.minimum(position + 1, piece.kv_len) - first_key
        scores = wgmma_rows.keep_before(scores, end, interpret=tiling.interpret)
    if left and window_left is not None:
        scores = wgmma_rows.keep_from(scores, position - window_left - first_key, interpret=tiling.interpret)
    return scores


def _weigh(state: softmax.RowState, scores: jax.Array, tiling: RowTiling) -> tuple[softmax.RowState, jax.Array]:
    """Returns the state with a tile's weights but without its values, and the weights."""
    after, reference, decay = softmax.raise_reference(state.reference_log2, scores.max(axis=1), tiling.problem.dtype)
    weights = softmax.row_weights(scores, reference)
    acc = wgmma_rows.rescale(state.acc, decay, interpret=tiling.interpret)
    return softmax.RowState(acc, after, softmax.add_weights(state.weight, decay, weights)), weights


def _absorb(
    smem: Smem, bars: Barriers, state: softmax.RowState, scores: jax.Array, work: Work, t: jax.Array, tiling: RowTiling
) -> softmax.RowState:
    """Returns the state with a tile's keys, holding the turn. Waits on v_ready and the next k_ready; frees V."""
    stage = work.stage(t, tiling)
    state, weights = _weigh(state, scores, tiling)
    # Nothing of the softmax may sink into the turn: the other warpgroup waits for it.
    state, low = lax.optimization_barrier((state, weights.astype(jnp.dtype(tiling.problem.dtype))))
    plgpu.barrier_wait(bars.v_ready.at[stage])
    clear_dead_keys(smem, bars, work, t, tiling)
    take_turn(work, tiling)

    def meanwhile(weight: jax.Array) -> jax.Array:
        following = bars.k_ready.at[work.stage(t + 1, tiling)]
        pl.when(t + 1 < work.tile.end)(lambda: plgpu.barrier_wait(following))
        return weight

    acc, weight = wgmma_rows.add_product(
        state.acc, low, smem.v.at[stage], state.weight, meanwhile, interpret=tiling.interpret
    )
    plgpu.barrier_arrive(bars.v_free.at[stage])
    return state._replace(acc=acc, weight=weight)


def clear_dead_keys(smem: Smem, bars: Barriers, work: Work, t: jax.Array, tiling: RowTiling) -> None:
    """Has warpgroup 0 clear the V rows that no row of the sequence sees, in the few tiles that have some.

    Warpgroup 0 arrives on v_clear, warpgroup 1 waits on it.
    """
    stage = work.stage(t, tiling)
    begin, end = tile_list.clean_rows_of(work.tile, t, tiling)

    @pl.when((begin > 0) | (end < tiling.block_kv))
    def _() -> None:
        @pl.when(work.warpgroup == 0)
        def _() -> None:
            pages.clear_dead_rows(smem.v.at[stage], begin, end, tiling)
            plgpu.barrier_arrive(bars.v_clear.at[stage])

        pl.when(work.warpgroup == 1)(lambda: plgpu.barrier_wait(bars.v_clear.at[stage]))
