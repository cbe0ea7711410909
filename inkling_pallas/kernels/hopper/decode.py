"""Attention for few query rows per sequence on sm_90: a split-KV kernel at the speed of memory, and its combine.

Keys are the rows of the matrix products (S^T = K Q^T, O^T = V^T P^T), so that query rows, few as they are, fill
columns in steps of 8. CTAs take equal shares of all KV tiles (`split_kv`), or those of a cluster share each unit
(`decode_cluster`). The first warpgroup of each computes, a warp of its second copies; `decode_scratch` holds their
protocol.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.integers import div, rem
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.hopper import decode_cluster, decode_scratch
from inkling_pallas.kernels.hopper.decode_scratch import Barriers, Results, Smem
from inkling_pallas.kernels.phases import bias, epilogue, pages, softmax
from inkling_pallas.kernels.phases.operands import Gmem
from inkling_pallas.kernels.schedule import split_kv
from inkling_pallas.kernels.schedule.seq_table import reader
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tiling import Tiling


def program(gmem: Gmem, results: Results, smem: Smem, bars: Barriers, tiling: Tiling) -> None:
    """The kernel of one CTA."""
    warpgroup = lax.axis_index("wg")
    if tiling.ranks > 1:
        mosaic.open_exchange(smem.parts_barrier, interpret=tiling.interpret)
    mosaic.wait_for_previous_kernel(interpret=tiling.interpret)
    mosaic.let_next_kernel_launch(interpret=tiling.interpret)
    pl.when(warpgroup == 0)(lambda: _compute(results, smem, bars, tiling))
    pl.when(warpgroup == 1)(lambda: _copy(gmem, smem, bars, tiling))


def _cta(tiling: Tiling) -> jax.Array:
    """Returns the number of this CTA, those of a cluster being neighbours."""
    return lax.axis_index("cta") if tiling.ranks == 1 else lax.axis_index("cta") * tiling.ranks + lax.axis_index("rank")


def _copy(gmem: Gmem, smem: Smem, bars: Barriers, tiling: Tiling) -> None:
    """Asks for page ids; one warp then makes the table and copies what the CTA needs.

    All copies come from one walk in one warp: three walks in three warps fetched three times the code, and small
    decodes took 0.2 to 0.3 us longer; 0.1 us, too, where the computing warpgroup started at once (NVIDIA H200, jax
    0.11.2, 2026-11-30).
    """
    cta = _cta(tiling)
    # Together the CTAs ask for all page ids while each still waits for the lengths: one memory latency less.
    pages.prefetch_table(gmem.block_table, cta, tiling)

    @plgpu.warp_map
    def _(warp: jax.Array) -> None:
        pl.when(warp == 0)(lambda: _copy_pieces(gmem, smem, bars, cta, tiling))


def _copy_pieces(gmem: Gmem, smem: Smem, bars: Barriers, cta: jax.Array, tiling: Tiling) -> None:
    """Copies queries, keys, biases and values in the order in which they are needed.

    Arrives on every *_ready, waits on every *_free.
    """
    table = split_kv.fill_table(gmem.plan, smem.table, tiling, by_warp=True)
    stages, group = tiling.num_stages, tiling.problem.group

    def wait_until_free(free: Any, place: jax.Array) -> None:
        pl.when(place >= stages)(lambda: plgpu.barrier_wait(free.at[rem(place, stages)]))

    def copy_piece(index: jax.Array, done: jax.Array, piece: Piece) -> None:
        pl.when(index > 0)(lambda: plgpu.barrier_wait(bars.q_free))
        # Rows past the sequence belong to the next one, or are zeros past the array.
        rows = gmem.q.at[pl.ds(piece.row, tiling.token_block), pl.ds(piece.head * group, group)]
        plgpu.copy_gmem_to_smem(rows, smem.q_rows, bars.q_ready)
        pl.loop(piece.begin, piece.end)(lambda t: copy_tile(done + t - piece.begin, piece, piece.first_tile + t))

    def copy_tile(place: jax.Array, piece: Piece, tile: jax.Array) -> None:
        slot, head = rem(place, stages), piece.head
        # Page ids are asked for before a slot is free, so that they are there when it is.
        chunks = pages.find_chunks(gmem.block_table, piece, tile, tiling)
        wait_until_free(bars.k_free, place)
        pages.note_absent(smem.table, decode_scratch.note_at(slot, tiling), chunks, tiling)
        pages.fetch_tile(gmem.key, chunks, smem.k.at[slot], bars.k_ready.at[slot], head, tiling, values=False)

        @pl.when(tile >= _first_biased(piece, tiling))
        def _() -> None:
            bias.fetch_block(gmem.rel_logits, smem.band.at[slot], bars.band_ready.at[slot], piece, tile, tiling)

        wait_until_free(bars.v_free, place)
        pages.fetch_tile(gmem.value, chunks, smem.v.at[slot], bars.v_ready.at[slot], head, tiling, values=True)
        # Only now may the others start: fetching their code would hold up this warp's.
        pl.when(place == 0)(lambda: plgpu.barrier_arrive(bars.table_ready))

    pieces, total = split_kv.for_each_piece(table, cta, tiling, copy_piece)
    pl.when(total == 0)(lambda: plgpu.barrier_arrive(bars.table_ready))
    if tiling.interpret:  # It wants every completion of a barrier to be seen.
        for i in range(stages):
            wait_until_free(bars.k_free, total + i)
            wait_until_free(bars.v_free, total + i)
        pl.when(pieces > 0)(lambda: plgpu.barrier_wait(bars.q_free))


def _compute(results: Results, smem: Smem, bars: Barriers, tiling: Tiling) -> None:
    """Attends the pieces of a CTA and writes them. Waits on every *_ready, arrives on every *_free."""
    plgpu.barrier_wait(bars.table_ready)
    table, cta = reader(smem.table, tiling), _cta(tiling)

    def attend_piece(index: jax.Array, done: jax.Array, piece: Piece) -> None:
        del index
        _stage_queries(smem, bars, tiling)
        state = _attend_tiles(smem, bars, piece, done, tiling)
        if tiling.ranks > 1:
            decode_cluster.merge(results, smem, bars, state, piece, cta, tiling)
        else:
            _write_piece(results, state, piece, cta, tiling)

    split_kv.for_each_piece(table, cta, tiling, attend_piece)
    if tiling.clears_rows:
        epilogue.clear_unowned_rows(results.out, results.lse, table, cta, tiling)


def _stage_queries(smem: Smem, bars: Barriers, tiling: Tiling) -> None:
    """Lays q_rows out as a matrix operand. Waits on q_ready, arrives on q_free."""
    plgpu.barrier_wait(bars.q_ready)
    shape = (tiling.columns, tiling.problem.head_dim)
    layout = mosaic.strided(shape, math.gcd(8, shape[0] * shape[1] // mosaic.THREADS))
    row, element = (mosaic.iota(shape, axis, layout) for axis in (0, 1))
    row = jnp.minimum(row, tiling.rows - 1)
    rows = mosaic.gather(smem.q_rows, row, element, layout=layout, vectors="neighbours", interpret=tiling.interpret)
    mosaic.store_operand(smem.q, rows, layout=layout, interpret=tiling.interpret)
    plgpu.commit_smem()
    plgpu.barrier_arrive(bars.q_free)


def _first_biased(piece: Piece, tiling: Tiling) -> jax.Array:
    """Returns the tile from which on a piece has bias.

    A window within the extent leaves no far tile worth a loop of its own.
    """
    problem = tiling.problem
    if problem.window_left is not None and problem.window_left < problem.rel_extent:
        return jnp.zeros_like(piece.first_pos)
    return split_kv.first_biased_tile(piece.first_pos, block_kv=tiling.block_kv, rel_extent=problem.rel_extent)


def _attend_tiles(smem: Smem, bars: Barriers, piece: Piece, done: jax.Array, tiling: Tiling) -> softmax.State:
    """Returns the softmax state of a piece's rows after its tiles: first the far ones, then those with bias."""
    columns, layout = tiling.columns, mosaic.WGMMA
    state = softmax.State(
        acc=mosaic.full((tiling.problem.head_dim, columns), 0.0, jnp.float32, layout),
        reference_log2=mosaic.full((columns,), -jnp.inf, jnp.float32, mosaic.WGMMA_COLUMNS),
        weight=mosaic.full((64, columns), 0.0, jnp.float32, layout),
    )
    first_biased = jnp.clip(_first_biased(piece, tiling) - piece.first_tile, piece.begin, piece.end)

    def step(t: jax.Array, state: softmax.State, *, biased: bool) -> softmax.State:
        slot = rem(done + t - piece.begin, tiling.num_stages)
        tile = piece.first_tile + t
        scores = _scores(smem, bars, slot, piece, tile, biased, tiling)
        dtype = tiling.problem.dtype
        state, weights = softmax.absorb(state, scores, dtype)
        mosaic.store_transposed(smem.weights, weights.astype(jnp.dtype(dtype)), interpret=tiling.interpret)
        plgpu.commit_smem()
        if biased:  # The commit just made also lets the copy engine overwrite the bias block.
            plgpu.barrier_arrive(bars.k_free.at[slot])
        return state._replace(acc=_add_values(state.acc, smem, bars, slot, piece, tile, tiling))

    window_left = tiling.problem.window_left
    if window_left is None or window_left >= tiling.problem.rel_extent:
        state = lax.fori_loop(piece.begin, first_biased, lambda t, s: step(t, s, biased=False), state)
    return lax.fori_loop(first_biased, piece.end, lambda t, s: step(t, s, biased=True), state)


def _scores(
    smem: Smem, bars: Barriers, slot: jax.Array, piece: Piece, tile: jax.Array, biased: bool, tiling: Tiling
) -> jax.Array:
    """Returns masked scores in log2 units, [block_kv, columns].

    Waits on k_ready and band_ready, arrives on k_free unless biased.
    """

    def read_bias() -> jax.Array | None:
        if not biased:
            return None
        plgpu.barrier_wait(bars.band_ready.at[slot])
        return bias.read_tile(smem.band.at[slot], piece, tile, tiling)

    plgpu.barrier_wait(bars.k_ready.at[slot])
    absent = pages.absent_chunks(smem.table, decode_scratch.note_at(slot, tiling), tiling)
    products, tile_bias = mosaic.matmul(
        smem.k.at[slot], smem.q.T, rows=tiling.block_kv, columns=tiling.columns, meanwhile=read_bias
    )
    if not biased:
        plgpu.barrier_arrive(bars.k_free.at[slot])
    scores = softmax.scores_log2(products, tile_bias, scale=tiling.problem.softmax_scale)
    scores = _mask_edge(scores, piece, tile, tiling)
    return lax.cond(absent != 0, lambda: _mask_absent(scores, absent, tiling), lambda: scores)


def _mask_absent(scores: jax.Array, absent: jax.Array, tiling: Tiling) -> jax.Array:
    """Returns the scores masked at the keys of page ids outside the pool."""
    key = mosaic.iota(scores.shape, 0, mosaic.WGMMA)
    return softmax.mask_chunks(scores, div(key, tiling.chunk), absent)


def _mask_edge(scores: jax.Array, piece: Piece, tile: jax.Array, tiling: Tiling) -> jax.Array:
    """Returns the scores masked where the tile holds keys that some row does not see."""
    window_left, first_key = tiling.problem.window_left, tile * tiling.block_kv
    edge = first_key + tiling.block_kv > jnp.minimum(piece.kv_len, piece.first_pos + 1)
    if window_left is not None:
        edge = edge | (first_key < piece.first_pos + piece.tokens - 1 - window_left)

    def mask() -> jax.Array:
        key = mosaic.iota(scores.shape, 0, mosaic.WGMMA)
        column = mosaic.iota(scores.shape[1:], 0, mosaic.WGMMA_COLUMNS)
        position = piece.first_pos - first_key + tiling.token_of(column)
        begin = jnp.zeros_like(position) if window_left is None else position - window_left
        return softmax.mask_tile(scores, key, begin, jnp.minimum(position + 1, piece.kv_len - first_key))

    return lax.cond(edge, mask, lambda: scores)


def _add_values(
    acc: jax.Array, smem: Smem, bars: Barriers, slot: jax.Array, piece: Piece, tile: jax.Array, tiling: Tiling
) -> jax.Array:
    """Returns acc + V^T weights. Waits on v_ready, arrives on v_free."""
    plgpu.barrier_wait(bars.v_ready.at[slot])
    first_key, window_left = tile * tiling.block_kv, tiling.problem.window_left
    begin, end = split_kv.live_keys(piece.kv_len, piece.tokens, piece.first_pos, window_left=window_left)

    @pl.when((first_key < begin) | (first_key + tiling.block_kv > end))
    def _() -> None:
        pages.clear_dead_rows(smem.v.at[slot], begin - first_key, end - first_key, tiling)

    acc = mosaic.matmul_onto(acc, smem.v.at[slot].T, smem.weights.T, interpret=tiling.interpret)
    plgpu.barrier_arrive(bars.v_free.at[slot])
    return acc


def _write_piece(results: Results, state: softmax.State, piece: Piece, cta: jax.Array, tiling: Tiling) -> None:
    """Writes a whole unit to the outputs, and part of one to its slot."""
    rows, lse_log2 = softmax.finish(state)
    live = piece.tokens * tiling.problem.group
    whole = (piece.begin == 0) & (piece.end == piece.tiles)

    def write(out: Any, lse: Any, lse_values: jax.Array, row_of: epilogue.RowOf) -> None:
        epilogue.store_columns(out, rows, row_of, live, tiling)
        if lse is not None:
            epilogue.store_scalars(lse, lse_values, row_of, live, tiling)

    @pl.when(whole)
    def _() -> None:
        write(results.out, results.lse, lse_log2 * softmax.LN_2, lambda r: split_kv.output_row(tiling, piece, r))

    if not tiling.whole_units:
        slot = split_kv.slot_of(cta, piece.end == piece.tiles) * tiling.rows

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            write(results.part_out, results.part_lse, lse_log2, lambda r: slot + r)
