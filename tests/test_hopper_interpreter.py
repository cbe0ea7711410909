"""The Hopper kernels in the GPU interpreter, race detector on, against the float64 oracle."""

import dataclasses
from typing import Any

import interpreted
import numpy as np
import pytest
from interpreted import LIMITS

from inkling_pallas.core.checked_call import check_call
from inkling_pallas.kernels import hopper
from inkling_pallas.testing.cases import Case, build

# The interpreter multiplies tiles with NumPy, which warns of the infinities that masks remove.
pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]


def case(name, q_lens, kv_lens, **kwargs):
    facts: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 1, "rel_extent": 128, "block_size": 16}
    return pytest.param(Case(name=name, kind="interpreter", q_lens=q_lens, kv_lens=kv_lens, **facts | kwargs), id=name)


CASES = [
    case("splits", (1,), (300,), num_splits=3),
    case("no_split", (1, 1), (200, 75), num_splits=1, num_kv_heads=2),
    case("window", (1, 1), (300, 75), window_size=(127, 0)),
    case("window_splits", (1, 1), (300, 75), window_size=(127, 0), num_splits=3),
    case("rows", (5, 3), (200, 75), window_size=(127, 0), num_splits=3),
    case("empty", (0, 1, 0, 2), (0, 3, 7, 2), rel_extent=8, window_size=(4, 0), block_size=8, padding_rows=3),
    case("no_keys", (1, 2), (0, 0), padding_rows=2),
    case("more_rows_than_keys", (5,), (3,), num_kv_heads=2),
    case("group_1", (3,), (130,), num_heads=1),
    case("group_3", (2, 1), (130, 65), num_heads=3, rel_extent=64),
    case("group_4", (4, 1), (150, 20), num_heads=4, window_size=(100, 0)),
    case("group_16", (8,), (100,), num_heads=16, rel_extent=64),
    case("head_dim_64", (1, 1), (130, 65), head_dim=64, dtype="float16", rel_extent=64),
    case("head_dim_256", (1,), (130,), head_dim=256, block_size=48, rel_extent=64),
    case("page_784", (1,), (300,), block_size=784),
    case("infinite", (1, 2), (130, 40), poison_value=float("inf")),
    case("freed_pages", (1,), (300,), window_size=(127, 0), freed_pages=True, num_splits=2),
    case("packed", (1, 2), (130, 40), num_kv_heads=2, layout="packed"),
    case("interleaved", (1, 2), (130, 40), num_kv_heads=2, layout="interleaved"),
]


def call(arguments, *, num_ctas=3, block_kv=64, **overrides):
    config = hopper.Config(block_kv=block_kv, num_stages=2, num_ctas=num_ctas)
    return interpreted.attend(arguments, config, **overrides)


def assert_right(arguments, capfd, limit=LIMITS["bfloat16"], **kwargs):
    interpreted.assert_right(call(arguments, **kwargs), arguments, capfd, limit)


@pytest.mark.parametrize("case", CASES)
def test_matches_the_oracle_without_a_race(case, capfd):
    assert_right(build(case), capfd, limit=LIMITS[case.dtype])


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("window", 4), ("empty", 2), ("no_keys", 2), ("group_3", 2), ("head_dim_64", 4), ("freed_pages", 2)],
)
def test_ctas_of_a_cluster_merge_their_parts(name, ranks, capfd):
    case: Any = next(param.values[0] for param in CASES if param.id == name)
    arguments = build(dataclasses.replace(case, num_splits=None))
    units = len(case.q_lens) * case.num_kv_heads
    config = hopper.Config(block_kv=64, num_stages=2, num_ctas=ranks * units, cluster_size=ranks)
    interpreted.assert_right(interpreted.attend(arguments, config), arguments, capfd, LIMITS[case.dtype])


@pytest.mark.parametrize("num_ctas", [1, 5])
def test_any_number_of_shares_is_right(num_ctas, capfd):
    two = Case(name="shares", kind="interpreter", q_lens=(1, 2), kv_lens=(250, 70), num_heads=8, num_kv_heads=1)
    assert_right(build(two), capfd, num_ctas=num_ctas)


def test_tiles_of_128_keys_are_right(capfd):
    wide = Case(
        name="wide", kind="interpreter", q_lens=(2,), kv_lens=(300,), num_heads=4, num_kv_heads=1, window_size=(150, 0)
    )
    assert_right(build(wide), capfd, block_kv=128)


def test_parts_with_rows_far_past_or_before_their_keys_are_right(capfd):
    arguments = build(
        Case(name="parts", kind="interpreter", q_lens=(1, 2, 1), kv_lens=(100, 64, 30), num_heads=8, num_kv_heads=1)
    )
    arguments["window_size"] = (63, 0)
    arguments["kv_offset"] = np.array([0, 40, 500], np.int32)
    arguments["total_seqlens"] = np.array([1000, 104, 530], np.int32)
    for cache in ("key_cache", "value_cache"):
        arguments[cache] = np.nan_to_num(arguments[cache].astype(np.float32)).astype(arguments[cache].dtype)
    assert_right(arguments, capfd)


def test_writes_float32_into_the_array_given_as_out():
    interpreted.assert_writes_into_out(call, 1)


def test_page_ids_outside_the_pool_spoil_only_their_own_sequence():
    interpreted.assert_bad_ids_spoil_only_their_own_sequence(call, (1, 1))


REFUSED = {
    "causal": {"causal": False, "window_right": None},
    "dtype": {"dtype": "float32", "out_dtype": "float32"},
    "head_dim": {"head_dim": 80},
    "num_kv_heads": {"num_heads": 17, "num_kv_heads": 1},
    "block_size": {"block_size": 12},
    "rel_extent": {"rel_extent": 100},
    "head_dim of many rows": {"head_dim": 256, "max_seqlen_q": 64},
    "batch_size": {"batch_size": 100_000},
    "empty": {"num_tokens": 0},
}


@pytest.mark.parametrize("fact", REFUSED)
def test_refuses_what_it_lacks_with_a_sentence(fact):
    problem = check_call(
        {
            **build(Case(name="refused", kind="interpreter", q_lens=(1,), kv_lens=(64,), num_heads=8, num_kv_heads=1)),
            **dict.fromkeys(("plan", "config", "kv_offset", "total_seqlens", "out", "out_dtype", "num_splits")),
            **{"backend": "portable", "interpret": False, "return_lse": False},
        }
    ).problem
    assert hopper.unsupported(problem) is None
    sentence = hopper.unsupported(dataclasses.replace(problem, **REFUSED[fact]))
    assert sentence is not None
    assert "must" in sentence
    assert "; got" in sentence
    assert sentence.endswith(".")
