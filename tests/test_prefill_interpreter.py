"""The Hopper prefill kernel in the GPU interpreter, race detector on, against the float64 oracle."""

from typing import Any

import interpreted
import numpy as np
import pytest
from interpreted import LIMITS

from inkling_pallas.kernels import hopper
from inkling_pallas.testing.cases import Case, build

# The interpreter multiplies tiles with NumPy, which warns of the infinities that masks remove.
pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]

NARROW = {"block_kv": 64, "num_stages": 2, "band_slots": 2}
RING = {"block_kv": 128, "num_stages": 2, "band_slots": 2, "overlap": True}
AHEAD = {"block_kv": 64, "num_stages": 2, "band_slots": 2, "overlap": True}


def case(name, q_lens, kv_lens, config=NARROW, **kwargs):
    facts: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 1, "rel_extent": 128, "block_size": 16}
    return pytest.param(
        Case(name=name, kind="interpreter", q_lens=q_lens, kv_lens=kv_lens, **facts | kwargs), config, id=name
    )


CASES = [
    case("full", (33,), (33,), num_kv_heads=2, num_heads=16),
    case("chunked", (11, 5), (200, 75)),
    case("ring", (20, 5), (300, 75), RING, rel_extent=64),
    case("window", (20, 3), (300, 75), window_size=(127, 0)),
    case("ring_window", (20,), (400,), RING, window_size=(127, 0)),
    case("window_past_the_extent", (18,), (200,), window_size=(127, 0), rel_extent=8, block_size=8),
    case("empty", (0, 1, 0, 2), (0, 3, 7, 2), rel_extent=8, window_size=(4, 0), block_size=8, padding_rows=3),
    case("no_keys", (1, 2), (0, 0), padding_rows=2),
    case("more_rows_than_keys", (20,), (5,), num_kv_heads=2),
    case("group_1", (70,), (130,), num_heads=1),
    case("group_3", (33, 2), (130, 65), num_heads=3, rel_extent=64),
    case("group_4", (33, 1), (150, 20), RING, num_heads=4, window_size=(100, 0)),
    case("group_16", (9,), (100,), RING, num_heads=16, rel_extent=64),
    case("head_dim_64", (20, 1), (130, 65), RING, head_dim=64, dtype="float16", rel_extent=64),
    case("page_48", (17,), (130,), block_size=48, rel_extent=64),
    case("page_784", (17,), (300,), block_size=784),
    case("freed_pages", (4,), (300,), window_size=(127, 0), freed_pages=True),
    case("last_keys_in_the_first_page_of_a_tile", (20,), (157,), RING, window_size=(4, 0), rel_extent=8),
    case("far_and_biased_ahead", (20, 5), (300, 75), AHEAD, rel_extent=64),
    case("group_3_ahead", (33, 2), (130, 65), AHEAD, num_heads=3, rel_extent=64),
    case("packed", (17,), (70,), num_kv_heads=2, num_heads=16, layout="packed"),
    case("interleaved", (17,), (70,), num_kv_heads=2, num_heads=16, layout="interleaved"),
]


def call(arguments, *, num_ctas=2, config=NARROW, few_rows=None, **overrides):
    choice = hopper.Config(program="prefill", num_ctas=num_ctas, few_rows=few_rows, **config)
    return interpreted.attend(arguments, choice, **overrides)


def assert_right(arguments, capfd, limit=LIMITS["bfloat16"], **kwargs):
    interpreted.assert_right(call(arguments, **kwargs), arguments, capfd, limit)


@pytest.mark.parametrize(("case", "config"), CASES)
def test_matches_the_oracle_without_a_race(case, config, capfd):
    assert_right(build(case), capfd, limit=LIMITS[case.dtype], config=config)


def test_keys_that_left_the_window_may_be_nan_in_a_page_still_used(capfd):
    window = build(
        Case(
            name="left",
            kind="interpreter",
            q_lens=(30,),
            kv_lens=(75,),
            num_heads=8,
            num_kv_heads=1,
            rel_extent=8,
            window_size=(4, 0),
            block_size=64,
        )
    )
    page = int(np.asarray(window["block_table"])[0, 0])
    for cache in ("key_cache", "value_cache"):
        window[cache] = np.asarray(window[cache]).copy()
        window[cache][page, :41] = np.nan
    assert_right(window, capfd, config=RING)


def test_a_mixed_batch_runs_both_kernels(capfd):
    lengths: dict[str, Any] = {"q_lens": (1, 20, 3, 0, 1), "kv_lens": (130, 90, 40, 8, 70)}
    mixed = Case(name="mixed", kind="interpreter", num_heads=8, num_kv_heads=1, padding_rows=3, **lengths)
    few_rows = hopper.Config(block_kv=64, num_stages=2, num_ctas=2)
    assert_right(build(mixed), capfd, few_rows=few_rows)


@pytest.mark.parametrize("config", [NARROW, RING], ids=["narrow", "ring"])
def test_a_cluster_of_ctas_shares_keys(config, capfd):
    two = Case(name="cluster", kind="interpreter", q_lens=(37, 2), kv_lens=(90, 70), num_heads=8, num_kv_heads=1)
    assert_right(build(two), capfd, num_ctas=4, config={**config, "cluster_size": 2})


@pytest.mark.parametrize("num_ctas", [1, 5])
def test_any_number_of_ctas_is_right(num_ctas, capfd):
    two = Case(name="ctas", kind="interpreter", q_lens=(18, 9), kv_lens=(90, 70), num_heads=8, num_kv_heads=1)
    assert_right(build(two), capfd, num_ctas=num_ctas)


@pytest.mark.parametrize("window", [(-1, -1), (63, 0)])
def test_parts_with_rows_far_past_or_before_their_keys_are_right(window, capfd):
    arguments = build(
        Case(name="parts", kind="interpreter", q_lens=(2, 9, 3), kv_lens=(100, 64, 30), num_heads=8, num_kv_heads=1)
    )
    arguments["window_size"] = window
    arguments["kv_offset"] = np.array([0, 40, 500], np.int32)
    arguments["total_seqlens"] = np.array([1000, 104, 530], np.int32)
    assert_right(arguments, capfd)


def test_writes_float32_into_the_array_given_as_out():
    interpreted.assert_writes_into_out(call, 9)


def test_page_ids_outside_the_pool_spoil_only_their_own_sequence():
    interpreted.assert_bad_ids_spoil_only_their_own_sequence(call, (17, 3))
