"""The schedule's integer arithmetic against brute force: tiles, shares, pieces and slots."""

import collections
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scalars
from hypothesis import given, settings
from hypothesis import strategies as st

from inkling_pallas.core.problem import Lengths, Problem, Sequences
from inkling_pallas.core.safe_lengths import safe_sequences
from inkling_pallas.kernels.schedule import seq_table, split_kv, stream_k
from inkling_pallas.kernels.schedule.tiling import MAX_COLUMNS, Tiling

pytestmark = pytest.mark.host

Piece = collections.namedtuple("Piece", split_kv.Piece._fields)  # of ints


def make_tiling(batch, *, max_q=1, group=4, window=None, splits=None, ctas=7, block_kv=64):
    problem = Problem(
        num_tokens=64,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=128,
        batch_size=batch,
        num_blocks=64,
        block_size=16,
        max_blocks=64,
        max_seqlen_q=max_q,
        softmax_scale=1.0,
        causal=True,
        window_left=window,
        window_right=0,
        rel_extent=64,
        num_splits=splits,
        dtype="bfloat16",
        out_dtype="bfloat16",
        return_lse=False,
    )
    return Tiling(problem=problem, block_kv=block_kv, num_stages=2, num_ctas=ctas)


def make_table(tiling, q_lens, kv_lens, first_pos=None):
    """The table of a batch on the host, scanned as the kernels scan it."""
    q_lens, kv_lens = (np.array(x, np.int32) for x in (q_lens, kv_lens))
    first = kv_lens - q_lens if first_pos is None else np.array(first_pos, np.int32)
    starts = np.concatenate([[0], np.cumsum(q_lens)[:-1]]).astype(np.int32)
    return split_kv.table_on_host(Sequences(*map(jnp.asarray, (starts, q_lens, kv_lens, first))), tiling)


def all_pieces(table, tiling):
    """The pieces of every CTA, as lists of Piece of ints, in the kernel's order."""
    collected = [[] for _ in range(tiling.num_ctas)]

    def note(cta, *piece):
        collected[cta].append(Piece(*piece))

    batch = range(tiling.problem.batch_size)
    words = jnp.asarray(
        [[int(table.at(row, sequence)) for sequence in batch] for row in range(seq_table.ROWS)], jnp.int32
    )

    def walk(words, cta):
        own = seq_table.Table(lambda row, sequence: words[row, sequence])
        split_kv.for_each_piece(own, cta, tiling, lambda index, done, piece: scalars.call_host(note, cta, *piece))

    walk_on_host = scalars.traced(walk, words, jnp.int32(0))
    for cta in range(tiling.num_ctas):
        walk_on_host(words, cta)
    return collected


def visible(q_len, kv_len, first_pos, window):
    """Keys that some row sees."""
    return {
        j
        for i in range(q_len)
        for j in range(kv_len)
        if j <= first_pos + i and (window is None or j >= first_pos + i - window)
    }


@given(
    q_len=st.integers(1, 9),
    kv_len=st.integers(0, 200),
    shift=st.integers(-300, 300),
    window=st.none() | st.integers(0, 150),
    block_kv=st.sampled_from([64, 128]),
)
@settings(max_examples=150)
def test_tiles_hold_every_visible_key_and_no_more(q_len, kv_len, shift, window, block_kv):
    first_pos = kv_len - q_len + shift
    arguments = [jnp.int32(x) for x in (kv_len, q_len, first_pos)]
    first, tiles = scalars.run(partial(split_kv.tile_range, block_kv=block_kv, window_left=window), *arguments)
    begin, end = scalars.run(partial(split_kv.live_keys, window_left=window), *arguments)
    keys = visible(q_len, kv_len, first_pos, window)
    assert tiles >= 1
    assert first >= 0
    assert first * block_kv < max(kv_len, 1)
    if keys:
        assert (first, first + tiles - 1) == (min(keys) // block_kv, max(keys) // block_kv)
        assert (begin, end) == (min(keys), max(keys) + 1)
    else:
        assert tiles == 1
        assert begin >= end


@given(first_pos=st.integers(-50, 900), extent=st.sampled_from([8, 64, 128, 512]), block_kv=st.sampled_from([64, 128]))
@settings(max_examples=100)
def test_far_tiles_are_those_without_a_distance_inside_the_extent(first_pos, extent, block_kv):
    rule = partial(split_kv.first_biased_tile, block_kv=block_kv, rel_extent=extent)
    (first,) = scalars.run(rule, jnp.int32(first_pos))
    far = [t for t in range(20) if first_pos - (t * block_kv + block_kv - 1) >= extent]
    assert first == len(far)


@jax.jit
def shares(length, ctas):
    """Where each share of a line starts, and the owner of each position; more of both than there are."""
    line = stream_k.share_line(length, ctas)
    return stream_k.share_start(line, jnp.arange(41)), stream_k.share_of(line, jnp.arange(400))


@given(length=st.integers(0, 400), ctas=st.integers(1, 40))
@settings(max_examples=60)
def test_shares_are_equal_and_a_position_finds_its_own(length, ctas):
    starts, owners = (np.asarray(x) for x in shares(length, ctas))
    starts, owners = starts[: ctas + 1], owners[:length]
    assert (starts[0], starts[-1]) == (0, length)
    sizes = np.diff(starts)[: min(length, ctas)]
    assert sizes.size == 0 or sizes.max() - sizes.min() <= 1
    if length:
        positions = np.arange(length)
        assert ((starts[owners] <= positions) & (positions < starts[owners + 1])).all()


BATCHES = {
    "even": {"q_lens": (1, 1, 1), "kv_lens": (700, 700, 700)},
    "skewed": {"q_lens": (1, 1, 1, 1), "kv_lens": (1, 900, 64, 65)},
    "one": {"q_lens": (1,), "kv_lens": (900,)},
    "empty rows": {"q_lens": (0, 1, 0, 2, 0), "kv_lens": (50, 0, 0, 129, 9), "max_q": 2},
    "nothing": {"q_lens": (0, 0), "kv_lens": (5, 0)},
    "token blocks": {"q_lens": (16, 3, 9), "kv_lens": (300, 3, 200), "max_q": 16, "group": 16},
    "window": {"q_lens": (4, 1, 2), "kv_lens": (500, 700, 30), "max_q": 4, "window": 127},
    "parts": {"q_lens": (1, 2, 1), "kv_lens": (100, 64, 0), "max_q": 2, "first_pos": (500, -3, 7), "window": 63},
}


@pytest.mark.parametrize("ctas", [1, 4, 7, 40])
@pytest.mark.parametrize("splits", [None, 1, 2, 3])
@pytest.mark.parametrize("name", BATCHES)
def test_pieces_cover_every_unit_once_and_in_order(name, splits, ctas):
    facts = dict(BATCHES[name])
    lengths = [facts.pop("q_lens"), facts.pop("kv_lens"), facts.pop("first_pos", None)]
    tiling = make_tiling(len(lengths[0]), splits=splits, ctas=ctas, **facts)
    pieces = all_pieces(make_table(tiling, *lengths), tiling)
    block = tiling.token_block
    expected = {
        (b, head, token // block) for b, q_len in enumerate(lengths[0]) for head in range(2) for token in range(q_len)
    }
    starts = np.concatenate([[0], np.cumsum(lengths[0])])
    parts = {}
    for cta, mine in enumerate(pieces):
        for piece in mine:
            assert piece.end > piece.begin
            assert 0 < piece.tokens <= block
            unit = (piece.sequence, piece.head, (piece.row - starts[piece.sequence]) // block)
            parts.setdefault(unit, []).append((cta, piece))
    assert set(parts) == expected
    for cut in parts.values():
        assert [piece.begin for _, piece in cut] == [0, *(piece.end for _, piece in cut[:-1])]
        assert cut[-1][1].end == cut[-1][1].tiles
        assert [cta for cta, _ in cut] == list(range(cut[0][0], cut[0][0] + len(cut)))
        assert splits is None or len(cut) <= splits
    counts = [sum(p.end - p.begin for p in mine) for mine in pieces if mine]
    if splits is None and counts:
        slack = max(p.tiles for mine in pieces for p in mine) - 1 if tiling.whole_units else 0
        assert max(counts) <= -(-(sum(counts) + tiling.unit_lead * len(expected)) // ctas) + slack


def test_units_under_a_window_are_whole_where_no_cta_has_much_more_than_its_share():
    many, wide = make_tiling(16, window=127), make_tiling(4, window=447)
    assert many.whole_units  # 32 units of 2 or 3 tiles for 7 CTAs
    for kv_len in (1000, 100, 1):
        pieces = all_pieces(make_table(many, [1] * 16, [kv_len] * 16), many)
        assert all(piece.end - piece.begin == piece.tiles for mine in pieces for piece in mine)
    assert not wide.whole_units  # 8 units of 8 tiles: a CTA would have 16 instead of 10
    cut = all_pieces(make_table(wide, [1] * 4, [1000] * 4), wide)
    assert max(sum(piece.end - piece.begin for piece in mine) for mine in cut) == 10
    assert make_tiling(4, window=447, splits=1).whole_units
    assert not make_tiling(16, window=127, splits=2).whole_units
    assert not make_tiling(16).whole_units


def test_units_that_a_cta_starts_count_like_a_tile_each():
    tiling = make_tiling(32, ctas=7)
    pieces = all_pieces(make_table(tiling, [1] * 32, [6400] + [64] * 31), tiling)
    work = [sum(p.end - p.begin + (p.begin == 0) for p in mine) for mine in pieces]
    assert max(work) - min(work) <= 1
    assert (pieces[0][0].tiles, pieces[-1][0].tiles) == (100, 1)
    assert make_tiling(1, ctas=11).unit_lead == 0  # 32 tiles: a CTA would have one more of three


def test_whole_units_go_round_the_ctas():
    tiling = make_tiling(16, window=127)
    pieces = all_pieces(make_table(tiling, [1] * 16, [500] * 16), tiling)
    units = [[2 * piece.sequence + piece.head for piece in mine] for mine in pieces]
    assert units == [list(range(cta, 32, 7)) for cta in range(7)]


@pytest.mark.parametrize("name", BATCHES)
def test_slots_of_partial_results_are_never_shared(name):
    facts = dict(BATCHES[name])
    lengths = [facts.pop("q_lens"), facts.pop("kv_lens"), facts.pop("first_pos", None)]
    tiling = make_tiling(len(lengths[0]), ctas=7, **facts)
    slots = [
        int(split_kv.slot_of(cta, piece.end == piece.tiles))
        for cta, mine in enumerate(all_pieces(make_table(tiling, *lengths), tiling))
        for piece in mine
        if not (piece.begin == 0 and piece.end == piece.tiles)
    ]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < tiling.slots for slot in slots)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 12, 16])
def test_output_rows_are_token_major_and_heads_of_the_group(group):
    tiling = make_tiling(1, max_q=4, group=group)
    piece = split_kv.Piece(*[jnp.int32(0)] * 11)._replace(head=jnp.int32(1), row=jnp.int32(5))
    rows = np.asarray(split_kv.output_row(tiling, piece, jnp.arange(tiling.rows)))
    expected = [
        (5 + token) * 2 * group + group + member for token in range(tiling.token_block) for member in range(group)
    ]
    assert rows.tolist() == expected


@pytest.mark.parametrize("group", range(1, 17))
def test_a_bias_block_holds_every_distance_of_its_tile_and_is_aligned(group):
    for max_q in (1, 2, 4, 8, 16):
        tiling = make_tiling(1, max_q=max_q, group=group)
        assert tiling.columns <= MAX_COLUMNS
        assert tiling.token_block * tiling.token_blocks == max_q
        assert tiling.band_width >= tiling.block_kv + 7 + tiling.token_block - 1
        assert tiling.rows * tiling.band_width * 2 % 128 == 0
        assert tiling.band_width % 8 == 0
        assert tiling.band_width <= 256


@settings(max_examples=60)
@given(st.data())
def test_rows_of_sequences_and_cleared_rows_are_all_rows_once(data):
    """What `clear_unowned_rows` clears by the table, beside the rows of sequences, whatever the offsets hold."""
    batch, max_q = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 4, 64]))
    tiling = make_tiling(batch, max_q=max_q)
    offsets = np.array(data.draw(st.lists(st.integers(-3, 70), min_size=batch + 1, max_size=batch + 1)), np.int32)
    lengths = Lengths(jnp.full(batch, 9, jnp.int32), jnp.asarray(offsets), None, None)
    sequences = safe_sequences(tiling.problem, lengths)
    table = split_kv.table_on_host(sequences, tiling)
    times = np.zeros(tiling.problem.num_tokens, int)
    times[int(table.at(5, batch - 1)) :] += 1
    for b in range(batch):
        start, q_len = int(table.at(0, b)), int(table.at(1, b))
        before = int(table.at(5, b - 1)) if b else 0
        times[start : start + q_len] += 1
        times[before : start if q_len else before] += 1
    assert (times == 1).all(), offsets.tolist()
