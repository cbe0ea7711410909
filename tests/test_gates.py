"""Each gate fails on a broken variant: a check that cannot fail is a defect."""

import dataclasses

import numpy as np
import pytest

from inkling_pallas import inkling_rel_attention
from inkling_pallas.testing import catalog, judge, promises
from inkling_pallas.testing.cases import Case

pytestmark = pytest.mark.host

_CASE = Case(
    name="gate",
    kind="gate",
    q_lens=(40, 1),
    kv_lens=(300, 420),
    rel_extent=512,
    block_size=32,
    num_heads=8,
    num_kv_heads=2,
)
_PARTS = Case(name="gate_parts", kind="gate", q_lens=(3, 1), kv_lens=(300, 420), rel_extent=512, parts=2)
_FINITE = Case(
    name="gate_finite", kind="gate", q_lens=(3, 1), kv_lens=(300, 420), rel_extent=512, block_size=32, poison=()
)


def _shift(rel_logits, keys):
    return np.pad(rel_logits, ((0, 0), (0, 0), (keys, 0)))[..., : rel_logits.shape[-1]]


def _unmask_last_page(call):
    block_size = call["key_cache"].shape[1]
    rounded = -(-call["cache_seqlens"] // block_size) * block_size
    # The rows keep their positions and see the rest of the page behind them as if it were keys.
    return {
        "cache_seqlens": rounded,
        "total_seqlens": call["cache_seqlens"].copy(),
        "causal": False,
        "window_size": (-1, -1),
    }


_BROKEN_CALLS = {
    "bias dropped": (_CASE, lambda call: {"rel_logits": np.zeros_like(call["rel_logits"])}),
    "bias shifted by one key": (_CASE, lambda call: {"rel_logits": _shift(call["rel_logits"], 1)}),
    "bias shifted by one tile": (_CASE, lambda call: {"rel_logits": _shift(call["rel_logits"], 128)}),
    "bias clipped to the last bucket": (
        Case(name="gate_clip", kind="gate", q_lens=(3,), kv_lens=(300,), rel_extent=128),
        lambda call: {
            "rel_extent": 300,
            "rel_logits": np.pad(call["rel_logits"], ((0, 0), (0, 0), (0, 172)), mode="edge"),
        },
    ),
    "table of the wrong head": (_CASE, lambda call: {"rel_logits": np.roll(call["rel_logits"], 1, axis=1)}),
    "scale multiplies the bias": (
        _CASE,
        lambda call: {"rel_logits": call["rel_logits"] / np.asarray(128, call["q"].dtype)},
    ),
    "page table ignored": (
        _FINITE,
        lambda call: {
            "block_table": np.arange(call["block_table"].size, dtype=np.int32).reshape(call["block_table"].shape)
        },
    ),
    "V = K": (_CASE, lambda call: {"value_cache": call["key_cache"]}),
    "last page unmasked": (_FINITE, _unmask_last_page),
    "poison read": (_CASE, _unmask_last_page),
}


def _broken(change):
    return lambda **call: inkling_rel_attention(**{**call, **change(call)})


@pytest.mark.parametrize("what", _BROKEN_CALLS)
def test_a_broken_variant_is_red(what):
    case, change = _BROKEN_CALLS[what]
    assert not judge.judge(case).red
    assert judge.judge(case, _broken(change)).red


def test_an_ignored_split_is_red():
    def first_part_only(**call):
        out, lse = inkling_rel_attention(**call)
        later = np.asarray(call["kv_offset"])[0] > 0
        return out, np.full_like(lse, -np.inf) if later else lse

    assert not judge.judge(_PARTS).red
    assert judge.judge(_PARTS, first_part_only).red


@pytest.mark.parametrize(
    "case", [case for case in catalog.small_cases() if case.kind == "spike probe"], ids=lambda c: c.name
)
def test_a_spike_off_by_one_key_is_red(case):
    assert judge.judge(case, _broken(lambda call: {"rel_logits": _shift(call["rel_logits"], 1)})).red


def test_a_long_cache_hides_the_bias_from_all_but_the_spike():
    one_head = Case(name="gate_long", kind="gate", q_lens=(1,), kv_lens=(65536,), num_heads=1, num_kv_heads=1)
    long = dataclasses.replace(one_head, rel_extent=1, block_size=128)
    dropped = _broken(lambda call: {"rel_logits": np.zeros_like(call["rel_logits"])})
    verdict = judge.judge(long, dropped)
    assert verdict.red
    assert "spike" in verdict.failure


def test_a_wrong_lse_is_red():
    def base_two(**call):
        out, lse = inkling_rel_attention(**call)
        return out, lse / np.float32(np.log(2))

    assert "LSE" in judge.judge(_CASE, base_two).failure


def test_a_row_that_leaks_between_sequences_is_red():
    def leaking(**call):
        out, lse = inkling_rel_attention(**call)
        alone = call["cu_seqlens_q"][1] == call["cu_seqlens_q"][-1]
        return (out.at[0].set(0) if alone else out), lse

    assert "alone" in judge.judge(_CASE, leaking).failure


def test_nan_in_a_row_without_keys_is_red():
    case = Case(name="gate_empty", kind="gate", q_lens=(5,), kv_lens=(3,))

    def careless(**call):
        out, lse = inkling_rel_attention(**call)
        return out.at[0].set(np.nan), lse

    assert judge.judge(case, careless).red


@pytest.mark.parametrize("promise", [promises.bad_contents, promises.growing_cache, promises.repeatable])
def test_a_broken_promise_is_named(promise):
    calls = 0

    def wrong_more_each_time(**call):
        nonlocal calls
        calls += 1
        result = inkling_rel_attention(**call)
        first = result[0] if isinstance(result, tuple) else result
        broken = first + first.dtype.type(calls)
        return (broken, result[1]) if isinstance(result, tuple) else broken

    with pytest.raises(promises.ContractError):
        promise("portable", wrong_more_each_time)
