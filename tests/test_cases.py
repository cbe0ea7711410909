"""Every kind of case, full and small, and the promises that no single case shows."""

import pytest

from inkling_pallas.testing import catalog, judge, promises
from inkling_pallas.testing.cases import Case

# Rows that see one key give its value, and those without any 0, whatever the bias: no probe can have a margin there.
_NO_MARGIN = {"zero_keys", "zero_padding", "absent_1_p_16_w_511"}

# What `check --full` has and is too long for here: other head_dims, of which each remainder by 64 stays, and spikes
# at other distances, of which those at edges of tiles stay.
_HEAD_DIMS = {16, 24, 64, 72, 104, 128, 160, 184, 240, 256}
_SPIKES = {
    1024: {0, 1, 7, 8, 127, 128, 1023},
    8191: {0, 63, 64, 127, 128, 129, 255, 256, 511, 512, 1023},
    65535: {0, 1023},
}


# Portable does not read num_splits, and walks batches of 500 alike for any number of heads.
_ALIKE = {"chunk_6_splits1", "chunk_6_splits2", "mixed_500_64_8", "mixed_500_64_16"}


def _is_run(case: Case) -> bool:
    if case.name in _ALIKE:
        return False
    if case.kind == "spike probe":
        return case.spike in _SPIKES[case.kv_lens[0]]
    return case.kind != "head_dim" or case.head_dim in _HEAD_DIMS


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    """A case of more than so many pairs takes longer to run without XLA's optimizations than it does to compile."""
    pairs = sum(q_len * kv_len for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True))
    return [pytest.mark.optimized] if pairs * case.num_heads > 3_000_000 else []


FULL_CASES = [case for case in catalog.full_cases() if _is_run(case)]


def _id(case: Case) -> str:
    return case.name


def _judge(case: Case) -> None:
    verdict = judge.judge(case, backend="portable")
    assert not verdict.red, verdict.failure
    assert verdict.margin >= judge.MIN_MARGIN or case.name in _NO_MARGIN


# On the second jax the small cases run under x64, in test_x64; these keep what most programs have.
WITHOUT_X64 = [case for case in catalog.small_cases() if case.name in ("small_decode", "small_mixed")]


@pytest.mark.small
@pytest.mark.optimized
@pytest.mark.parametrize("case", WITHOUT_X64, ids=_id)
def test_small_case(case):
    _judge(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, marks=_marks(case), id=case.name) for case in FULL_CASES])
def test_full_case(case):
    _judge(case)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("kind", promises.CONTRACT_CHECKS)
def test_contract(kind):
    promises.CONTRACT_CHECKS[kind]("portable")


def test_what_is_run_has_each_remainder_of_head_dim_and_each_distance_of_a_spike():
    every = catalog.full_cases()
    head_dims = {case.head_dim for case in every if case.kind == "head_dim"}
    assert {min(head_dims), max(head_dims)} < _HEAD_DIMS < head_dims
    assert {head_dim % 64 for head_dim in _HEAD_DIMS} == {head_dim % 64 for head_dim in head_dims}
    assert set().union(*_SPIKES.values()) == {case.spike for case in every if case.kind == "spike probe"}
    assert len(every) - len(FULL_CASES) == (31 - 10) + (42 - 20) + len(_ALIKE)


def test_each_kind_has_both_forms_and_names_are_unique():
    full, small = catalog.full_cases(), catalog.small_cases()
    assert set(catalog.kinds(full)) == set(catalog.kinds(small))
    names = [case.name for case in (*full, *small)]
    assert len(names) == len(set(names))
