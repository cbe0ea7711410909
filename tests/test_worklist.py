"""The prefill kernel's list of tiles against brute force: every row once, longest first, and the bands of a tile."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scalars
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_pallas.core.problem import Lengths, Problem, Sequences
from inkling_pallas.kernels.schedule import tile_list, tile_list_kernel
from inkling_pallas.kernels.schedule.tiling import ROWS, WARPGROUPS, RowTiling

pytestmark = pytest.mark.host

Edges = collections.namedtuple("Edges", tile_list.Bands._fields)  # of ints
Ints = collections.namedtuple("Ints", tile_list.Item._fields)
HEADS = 2


def make_tiling(batch, *, tokens=64, group=8, window=None, max_q=64, ctas=7, block_kv=64, extent=64, head_dim=128):
    problem = Problem(
        num_tokens=tokens,
        num_heads=HEADS * group,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        batch_size=batch,
        num_blocks=64,
        block_size=16,
        max_blocks=64,
        max_seqlen_q=max_q,
        softmax_scale=1 / 128,
        causal=True,
        window_left=window,
        window_right=0,
        rel_extent=extent,
        num_splits=None,
        dtype="bfloat16",
        out_dtype="bfloat16",
        return_lse=False,
    )
    return RowTiling(problem=problem, block_kv=block_kv, num_stages=2, num_ctas=ctas, band_slots=2, interpret=True)


def make_list(tiling, q_lens, kv_lens):
    q_lens, kv_lens = (np.array(x, np.int32) for x in (q_lens, kv_lens))
    starts = np.concatenate([[0], np.cumsum(q_lens)[:-1]]).astype(np.int32)
    cu = jnp.asarray(np.concatenate([starts, [q_lens.sum()]]).astype(np.int32))
    return tile_list_kernel.make_worklist(Lengths(jnp.asarray(kv_lens), cu, None, None), tiling, True)


BATCHES = {
    "one": ((64,), (300,)),
    "several": ((17, 1, 30, 16), (17, 900, 40, 16)),
    "empty rows": ((0, 20, 0, 3, 0), (50, 0, 0, 129, 9)),
    "nothing": ((0, 0), (5, 0)),
    "more than threads": ((700, 1, 900, 640), (701, 300, 4000, 640)),
}


@functools.cache
def listed(name, window):
    """Returns (tiling, list) of a batch, the list as arrays of the host."""
    q_lens, kv_lens = BATCHES[name]
    tiling = make_tiling(len(q_lens), window=window, tokens=max(64, sum(q_lens)), max_q=1024)
    return tiling, jax.tree.map(np.asarray, make_list(tiling, q_lens, kv_lens))


@pytest.mark.interpreter
@pytest.mark.parametrize("window", [None, 63])
@pytest.mark.parametrize("name", BATCHES)
def test_items_hold_every_row_once_with_most_keys_first(name, window):
    q_lens, kv_lens = BATCHES[name]
    tiling, work = listed(name, window)
    total = work.table[4, -1]
    live, starts = [Ints(*row[: len(Ints._fields)]) for row in work.items[:total].tolist()], np.cumsum([0, *q_lens])
    assert all(0 < item.tokens <= tiling.tile_tokens for item in live)  # not so in a place that no item took
    rows = sorted(row for item in live for row in range(item.row, item.row + item.tokens))
    assert rows == list(range(sum(q_lens)))
    assert total == sum(-(-q_len // tiling.tile_tokens) for q_len in q_lens)
    for item in live:
        assert starts[item.sequence] <= item.row
        assert item.row + item.tokens <= starts[item.sequence + 1]
        assert item.first_pos == kv_lens[item.sequence] - q_lens[item.sequence] + item.row - starts[item.sequence]
    slack = 0 if window is None else 1  # There, items are ordered by how many tiles they may have.
    assert all(a.tiles + slack >= b.tiles for i, a in enumerate(live) for b in live[i:])


@pytest.mark.interpreter
@pytest.mark.parametrize("ctas", [1, 4, 7, 40])
@pytest.mark.parametrize("name", BATCHES)
def test_ctas_share_the_list_and_count_what_they_did(name, ctas):
    tiling, work = listed(name, None)
    tiling = dataclasses.replace(tiling, num_ctas=ctas)  # The list is the same for any number of them.
    seen, mine = [], []

    def note(tile, counts):
        words, form = jax.tree.flatten((tile, counts))
        scalars.call_host(lambda *words: mine.append(jax.tree.unflatten(form, words)), *words)

    walk = scalars.traced(lambda work, cta: tile_list.for_each_tile(work, cta, tiling, note), work, jnp.int32(0))
    for cta in range(ctas):
        mine.clear()
        end = walk(work, cta)
        kv_tiles = [tile.piece.tiles for tile, _ in mine]
        slots = [tile.end - tile.first_biased + tiling.query_items for tile, _ in mine]
        counts = [tuple(n) for _, n in mine] + [tuple(end)]
        assert counts == [(sum(kv_tiles[:i]), sum(slots[:i]), i) for i in range(len(mine) + 1)]
        seen += [(tile.piece.row, tile.piece.head) for tile, _ in mine]
    assert len(set(seen)) == len(seen) == int(work.table[4, -1]) * HEADS


@given(
    tokens=st.integers(1, 16),
    kv_len=st.integers(0, 400),
    shift=st.integers(-300, 300),
    window=st.none() | st.integers(0, 150),
    block_kv=st.sampled_from([64, 128]),
    extent=st.sampled_from([8, 64, 128]),
    group=st.sampled_from([1, 3, 8, 16]),
)
@settings(max_examples=150)
def test_bands_need_no_mask_and_no_bias_that_they_lack(tokens, kv_len, shift, window, block_kv, extent, group):
    tiling = make_tiling(1, group=group, window=window, block_kv=block_kv, extent=extent)
    tokens = min(tokens, tiling.tile_tokens)
    positions = Sequences(*(jnp.array([x], jnp.int32) for x in (0, tokens, kv_len, kv_len - tokens + shift)))
    item = tile_list_kernel.item_of(Sequences(*(x[0] for x in positions)), jnp.int32(0), jnp.int32(0), tiling)
    tile = tile_list.tile_of(item, jnp.int32(0), tiling)
    for warpgroup in range(WARPGROUPS):
        rows = tile_list.rows_of(tile, 0, warpgroup, tiling)
        bands = Edges(*map(int, tile_list.bands_of(tile, rows, tiling)))
        first_pos = int(rows.first_pos)
        assert list(bands) == sorted(bands)
        assert (bands.first, bands.end) == (int(tile.piece.first_tile), int(tile.end))
        assert int(tile.first_biased) == bands.first if window is not None else int(tile.first_biased) >= bands.first
        for t in range(bands.first, bands.end):
            keys = range(t * block_kv, (t + 1) * block_kv)
            row_positions = range(first_pos, first_pos + tiling.token_block)
            hidden_right = keys[-1] > row_positions[0] or keys[-1] >= kv_len
            hidden_left = window is not None and keys[0] < row_positions[-1] - window
            near = row_positions[0] - keys[-1] < extent and keys[0] <= row_positions[-1]
            left_band, far = t < bands.edge_end, bands.edge_end <= t < bands.biased
            assert left_band or not hidden_left
            assert left_band or t >= bands.diagonal or not hidden_right
            assert not (far and window is None and near)
            assert t < int(tile.first_biased) or not far


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_bias_block_holds_every_distance_and_queries_fit_their_slot(group, block_kv, head_dim):
    tiling = make_tiling(1, group=group, block_kv=block_kv, head_dim=head_dim)
    assert tiling.rows <= ROWS
    assert tiling.band_width >= block_kv + 7 + tiling.token_block - 1
    assert tiling.query_width >= head_dim
    for width in (tiling.band_width, tiling.query_width):
        assert tiling.rows * width * 2 % 128 == 0
        assert width % 8 == 0
        assert width <= 256
