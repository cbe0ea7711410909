"""README says what the results files say; plots and pictures of phases show what they should."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import inkling_pallas as ip
from inkling_pallas.bench import plots, report, series, workloads
from inkling_pallas.plots import call as pictures
from inkling_pallas.plots import kernel as phase_pictures
from inkling_pallas.plots import kernel_data
from inkling_pallas.testing.cases import Case, build

pytestmark = pytest.mark.host

ROOT = Path(__file__).parent.parent
RESULTS = series.load_results(ROOT / "notebooks" / "results")


def case_of(name, us, **facts):
    cost = workloads.cost(workloads.WORKLOADS[name])
    case = {"name": name, "us": us, "fraction": 0.5, "floor_us": us and us / 2, "reason": None, "peers": {}}
    return case | {"bytes": cost.num_bytes, "flops": cost.flops} | facts


def results_of(suite, *cases):
    meta = {"suite": suite, "card": "card", "driver": "1", "jax": "2", "date": "2026-01-02T03", "command": "bench"}
    ceilings = {"read": [{"bytes": 4 * 10**9, "us": 1000.0}], "matmul_tflops": 800.0}
    return {"meta": meta, "ceilings": ceilings, "cases": list(cases)}


def times(**us):
    return {name: {"us": one, "mhz": None, "watts": None, "mj": None} for name, one in us.items()}


MADE = {
    "scaling": results_of(
        "scaling",
        *(case_of(f"dec_g_b1_{keys}k", 10.0 * keys, peers={"a_nobias": 5.0}) for keys in (1, 8, 64)),
        *(case_of(f"dec_g_b{batch}_8k", 10.0 * batch) for batch in (2, 4)),
        *(case_of(f"pre_l16_{rows}k", 50.0 * rows) for rows in (1, 2)),
        case_of("skew_g", 300.0),
        case_of("even32_g", 290.0),
    ),
    "decode": results_of(
        "decode",
        case_of("dec_g_b1_8k", None, reason="too slow"),
        case_of(
            "dec_g_b8_8k",
            60.0,
            peers={"a_nobias": 50.0},
            busy={"inkling_pallas": {"us": 70.0, "mj": 40.0}, "b_nobias": {"us": 45.0}, "c": {"us": 1.0}},
        ),
    ),
}


def test_readme_is_what_the_results_give():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert report.with_tables(text, RESULTS, "docs/plots") == text, "run `python -m inkling_pallas report`"
    for name in report.figures(RESULTS):
        assert {(ROOT / f"docs/plots/{name}-{theme}.svg").is_file() for theme in ("light", "dark")} == {True}


def test_a_changed_result_or_table_is_noticed():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    other = json.loads(json.dumps(RESULTS))
    other["decode"]["cases"][0]["us"] += 1.0
    assert report.with_tables(text, other, "docs/plots") != text
    wrong = re.sub(r"\| dec_g_b1_8k \| [^|]*", "| dec_g_b1_8k | 1.0 ", text)
    assert wrong != text
    assert report.with_tables(wrong, RESULTS, "docs/plots") == text


def test_a_case_that_was_not_timed_stands_in_the_table():
    table = series.markdown_table(MADE["decode"])
    assert "| dec_g_b1_8k | - | - | - | - | - | - | - | not timed: too slow |" in table
    row = "| dec_g_b8_8k | 60.0 | 70.0 | 40.0 | 30.0 | 0.500 | 50.0 a | 45.0 b | 0.500 of floor, >= 0.88 MISSED |"
    assert row in table


def test_sweeps_hold_the_cases_in_order():
    cases = series.all_cases(MADE)
    assert [point.x for point in series.by_keys(cases)["global, heads 64/8"]] == [1024, 8192, 65536]
    assert [point.x for point in series.by_batch(cases)["global, heads 64/8"]] == [1, 2, 4, 8]
    assert [point.x for point in series.by_rows(cases)["local, heads 64/16"]] == [1024, 2048]
    results = {"local": results_of("local", case_of("skew_g", 1.0)), **MADE}  # Its pair is of another run.
    assert [(a["us"], b["us"]) for a, b in series.skew_pairs(results)] == [(300.0, 290.0)]
    assert [(a["name"], b["name"]) for a, b in series.skew_pairs(MADE)] == [("skew_g", "even32_g")]


def test_report_writes_tables_and_plots(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{report._BEGIN}\nold\n{report._END}\nbelow\n")
    arguments = ["--readme", str(readme), "--plots", str(tmp_path / "plots"), "--results", str(tmp_path)]
    assert report.main(arguments) == 2
    assert "must hold files that `bench` wrote for whole suites" in capsys.readouterr().err
    for suite, results in MADE.items():
        (tmp_path / f"nvidia-h200-{suite}.json").write_text(json.dumps(results))
    assert report.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "old" not in text
    written = {path: path.read_bytes() for path in (tmp_path / "plots").glob("*.svg")}
    assert len(written) == 2 * len(report.figures(MADE))
    assert report.main(arguments) == 0
    assert all(path.read_bytes() == old for path, old in written.items())  # a second report changes no file
    readme.write_text("no place")
    assert report.main(arguments) == 2


def test_plots_say_what_they_show():
    costs = plots.plot_costs(MADE, plots.DARK)
    titles = [axes.get_title(loc="left") for axes in costs.axes]
    assert titles == ["Decode of one sequence", "Decode of 8,192 keys each", "Prefill of one sequence"]
    peers = plots.plot_peers(MADE["scaling"])
    assert [text.get_text() for text in peers.axes[0].get_legend().get_texts()] == ["a_nobias"]
    busy = case_of("dec_g_b8_8k", 60.0, peers={"a_nobias": 90.0}, busy=times(inkling_pallas=50.0, a_nobias=100.0))
    axes = plots.plot_peers(results_of("decode", busy)).axes[0]
    assert [points.get_offsets().tolist() for points in axes.collections[:2]] == [[[1.5, 0.0]], [[2.0, 0.0]]]
    assert axes.get_legend().get_texts()[-1].get_text() == "hollow: without rests"


def test_bands_cover_the_tiles_that_rows_see_and_no_others():
    for window in (None, 40):
        batch = kernel_data.Batch(q_lens=(40, 1, 17), kv_lens=(300, 90, 17), rel_extent=64, window_left=window)
        parts = kernel_data.prefill_bands(batch, block_kv=64)
        rows = [row for part in parts for row in range(part.row, part.row + part.tokens)]
        assert sorted(rows) == list(range(58))
        for part in parts:
            start = part.row - sum(batch.q_lens[: part.sequence])
            last = batch.kv_lens[part.sequence] - batch.q_lens[part.sequence] + start + part.tokens - 1
            assert part.bands[-1] > last // 64
            assert list(part.bands) == sorted(part.bands)


@pytest.mark.parametrize(("first_pos", "first_key"), [(90, 64), (200, 64), (64, 64), (500, 64)])
def test_the_gathered_tile_is_the_formula(first_pos, first_key):
    table = np.random.default_rng(0).normal(size=(4, 96)).astype(np.float32)
    gather = kernel_data.gather_tile(table, first_pos=first_pos, first_key=first_key, keys=64)
    dist = first_pos + np.arange(4)[:, None] - first_key - np.arange(64)
    expected = np.where((dist >= 0) & (dist < 96), table[np.arange(4)[:, None], np.clip(dist, 0, 95)], 0)
    np.testing.assert_array_equal(gather.tile, expected)
    np.testing.assert_array_equal(np.take_along_axis(gather.block, gather.places, axis=1), expected)
    assert gather.first_distance % 8 == 0


@pytest.mark.parametrize("first_pos", [90, 3, 200])
def test_a_sheared_row_holds_the_bias_of_each_key(first_pos):
    table = np.random.default_rng(0).normal(size=(9, 24)).astype(np.float32)
    sheared = kernel_data.shear_table(table, first_pos=first_pos)
    assert not np.any(sheared.first_keys % 8)
    dist = first_pos + np.arange(9)[:, None] - sheared.first_keys[:, None] - np.arange(sheared.table.shape[1])
    expected = np.where((dist >= 0) & (dist < 24), table[np.arange(9)[:, None], np.clip(dist, 0, 23)], 0)
    np.testing.assert_array_equal(sheared.table, expected)


def test_shares_cut_the_line_into_equal_parts():
    batch = kernel_data.Batch(q_lens=(1, 1, 1), kv_lens=(1500, 200, 90))
    shares = kernel_data.decode_shares(batch, num_ctas=12)
    unit = [(share.sequence, share.head) for share in shares]
    starts = [before != after for before, after in zip([None, *unit], unit, strict=False)]  # of units, a position each
    ends = [0, *(share.end for share in shares)]
    assert [share.begin for share in shares] == [end + start for end, start in zip(ends, starts, strict=False)]
    assert shares[-1].end == 2 * (25 + 5 + 3)
    equal = [5 * cta + min(cta, 6) for cta in range(13)]  # 66 positions: six shares of 6, six of 5
    assert all(equal[s.cta] <= s.begin < s.end <= equal[s.cta + 1] for s in shares)
    assert [share.whole for share in shares][-2:] == [True, True]


def test_merging_parts_gives_the_row_over_all_keys():
    call = build(Case(name="merge", kind="", q_lens=(1,), kv_lens=(200,), dtype="float32", head_dim=64, poison=()))
    merge = kernel_data.merge_row(call, token=0, head=1, num_parts=3)
    np.testing.assert_allclose(merge.merged, merge.whole, atol=1e-6)
    assert merge.weights.sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.optimized
def test_pages_may_move_without_a_change_of_bits():
    call = pictures.example_call()
    moved = pictures.move_pages(call, seed=3)
    assert not np.array_equal(moved["block_table"], call["block_table"])
    np.testing.assert_array_equal(ip.inkling_rel_attention(**moved), ip.inkling_rel_attention(**call))


def test_each_picture_of_a_phase_shows_itself():
    call = build(Case(name="merge", kind="", q_lens=(1,), kv_lens=(100,), dtype="float32", head_dim=64, poison=()))
    batch = kernel_data.Batch(q_lens=(16,), kv_lens=(200,), rel_extent=64)
    figures = [
        phase_pictures.plot_prefill_bands(batch),
        phase_pictures.plot_gather(kernel_data.gather_tile(np.ones((2, 16)), first_pos=9, first_key=0, keys=64)),
        phase_pictures.plot_shares(batch, num_ctas=3),
        phase_pictures.plot_sheared(np.ones((2, 16)), first_pos=9),
        phase_pictures.plot_merge(kernel_data.merge_row(call, token=0, head=0, num_parts=2)),
        phase_pictures.plot_buckets([3, 5, 17, 3]),
    ]
    assert all(figure._repr_png_().startswith(b"\x89PNG") for figure in figures)
    assert [text.get_text() for text in figures[-1].axes[1].get_legend().get_texts()] == ["as it is: 3", "bucket: 3"]
