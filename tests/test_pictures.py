"""The pictures show what the operator does, and say what they need."""

import dataclasses
import re
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import inkling_pallas as ip
from inkling_pallas.plots import call as pictures
from inkling_pallas.plots import call_data as data
from inkling_pallas.testing.cases import Case, build, part_of

pytestmark = pytest.mark.host

EXAMPLE = pictures.example_call()
CASES = (
    Case(name="global", kind="", q_lens=(9, 3), kv_lens=(50, 23), rel_extent=8, dtype="float32", head_dim=64),
    Case(name="window", kind="", q_lens=(9, 3), kv_lens=(50, 2), rel_extent=8, window_size=(11, 0), dtype="float32"),
    Case(name="two sides", kind="", q_lens=(9,), kv_lens=(30,), causal=False, window_size=(5, 4), dtype="float32"),
    Case(name="right", kind="", q_lens=(9,), kv_lens=(30,), causal=False, window_size=(-1, 3), dtype="float32"),
    Case(name="packed", kind="", q_lens=(9,), kv_lens=(30,), layout="packed", dtype="float32"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_and_distances_give_the_row_of_the_oracle(case):
    call = build(case)
    values = build(dataclasses.replace(case, layout="separate"))["value_cache"]
    expected = np.asarray(ip.reference_rel_attention(**call))
    no_bias = ip.reference_rel_attention(**call | {"rel_logits": np.zeros_like(call["rel_logits"])})
    no_bias = np.asarray(no_bias)
    for token, head in ((0, 0), (case.num_tokens - 1, case.num_heads - 1)):
        sequence = data.sequence_with_row(call, token)
        weights = data.row_weights(call, token, head)
        keys = sequence.first_pos + token - sequence.q_start - weights.dist
        places = sequence.pages[keys // case.block_size], keys % case.block_size, head // (case.num_heads // 2)
        for got, want in ((weights.with_bias, expected), (weights.without_bias, no_bias)):
            np.testing.assert_allclose(got @ values[places].astype(np.float64), want[token, head], atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bands_are_what_the_formula_says_of_each_pair(case):
    call = build(case)
    left, right = (np.inf if side == -1 else side for side in case.window_size)
    sequence = data.sequence_of(call, 0)
    bands = data.bands(call, sequence, np.arange(sequence.q_len), np.arange(sequence.kv_len + 2))
    for (row, key), band in np.ndenumerate(bands):
        dist = case.kv_lens[0] - case.q_lens[0] + row - key
        hidden = key >= case.kv_lens[0] or dist > left or -dist > (0 if case.causal else right)
        near = 0 <= dist < case.rel_extent
        assert band == (data.HIDDEN if hidden else data.BIASED if near else data.FAR)


@pytest.mark.parametrize("index", [0, 1])
def test_positions_of_a_part_count_from_its_first_key(index):
    call = part_of(build(CASES[0]), index, 2)
    whole = build(CASES[0])
    part, full = data.sequence_of(call, 0), data.sequence_of(whole, 0)
    first = int(call["kv_offset"][0])
    assert part.first_pos == full.first_pos - first
    rows = np.arange(full.q_len)
    np.testing.assert_array_equal(
        data.bands(call, part, rows, np.arange(part.kv_len)),
        data.bands(whole, full, rows, np.arange(first, first + part.kv_len)),
    )


def test_owners_are_those_of_the_block_table():
    owner, block = data.page_owners(EXAMPLE)
    for b, pages in enumerate((13, 4, 2)):
        ids = EXAMPLE["block_table"][b, :pages]
        assert (owner[ids] == b).all()
        assert block[ids].tolist() == list(range(pages))
    assert (owner >= 0).sum() == 19
    freed = build(dataclasses.replace(CASES[1], freed_pages=True))
    assert (data.page_owners(freed)[0] >= 0).sum() < (data.page_owners(build(CASES[1]))[0] >= 0).sum()


def test_the_overview_is_a_picture_of_four(tmp_path):
    path = tmp_path / "overview.png"
    pictures.save_overview(path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1430, 880)
    titles = [axes.get_title(loc="left") for axes in pictures.plot_overview(EXAMPLE).axes]
    assert titles[:4] == [
        "Bias table of row 63: rel_logits[63]",
        "Pool of 28 pages of 16 keys",
        "Weights of row 63, head 0",
        "Which keys the rows of sequence A see",
    ]


def test_a_sheared_bias_is_drawn_by_distance():
    names = ("rel_logits", "cu_seqlens_q", "cache_seqlens")
    arguments: dict[str, Any] = {name: EXAMPLE[name] for name in names}
    sheared = dict(EXAMPLE, rel_logits=ip.shear(**arguments))
    plain, other = (pictures.plot_bias_table(call).axes[0].images[0].get_array() for call in (EXAMPLE, sheared))
    np.testing.assert_array_equal(plain, other)


def test_each_picture_shows_itself_in_a_notebook():
    long = build(Case(name="long", kind="", q_lens=(1, 40), kv_lens=(2000, 40), window_size=(511, 0), rel_extent=512))
    blind = build(Case(name="blind", kind="", q_lens=(5,), kv_lens=(3,)))
    figures = [
        pictures.plot_bias_table(EXAMPLE),
        pictures.plot_row_weights(EXAMPLE, token=64, head=3),
        pictures.plot_row_weights(blind, token=0),
        pictures.plot_pages(long),
        pictures.plot_bands(long, sequence=0),
        pictures.plot_bands(EXAMPLE),
    ]
    assert all(figure._repr_png_().startswith(b"\x89PNG") for figure in figures)
    assert "this row sees no key" in [text.get_text() for text in figures[2].axes[0].texts]


def test_the_legend_says_how_much_the_bias_draws_near():
    labels = pictures.plot_row_weights(EXAMPLE).axes[0].get_legend_handles_labels()[1]
    shares = {label.split(" the bias")[0]: int(label.split(": ")[1].split("%")[0]) for label in labels}
    assert shares["with"] > shares["without"] + 20


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("Pictures need matplotlib: pip install 'inkling-pallas[demo]'.")):
        pictures.plot_overview(EXAMPLE)


def test_a_row_of_no_sequence_and_no_such_sequence_are_named():
    with pytest.raises(ValueError, match=re.escape("token must lie in [0, 69), the rows of the batch; got 69.")):
        pictures.plot_row_weights(EXAMPLE, token=69)
    with pytest.raises(ValueError, match=re.escape("sequence must lie in [0, 3); got 3.")):
        pictures.plot_bands(EXAMPLE, sequence=3)


def test_importing_pictures_does_not_import_matplotlib():
    source = "import sys, inkling_pallas.plots.call; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source]).returncode == 0
