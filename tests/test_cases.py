"""Every kind of case, full and small, and the promises that no single case shows."""

import pytest

from inkling_pallas.testing import catalog, judge, promises
from inkling_pallas.testing.cases import Case

# Rows that see a single key give its value, whatever the bias: no probe can have a margin there.
_NO_MARGIN = {"zero_keys", "zero_padding"}


def _id(case: Case) -> str:
    return case.name


def _judge(case: Case) -> None:
    verdict = judge.judge(case, backend="portable")
    assert not verdict.red, verdict.failure
    assert verdict.margin >= judge.MIN_MARGIN or case.name in _NO_MARGIN


@pytest.mark.parametrize("case", catalog.small_cases(), ids=_id)
def test_small_case(case):
    _judge(case)


@pytest.mark.full
@pytest.mark.parametrize("case", catalog.full_cases(), ids=_id)
def test_full_case(case):
    _judge(case)


@pytest.mark.parametrize("kind", promises.CONTRACT_CHECKS)
def test_contract(kind):
    promises.CONTRACT_CHECKS[kind]("portable")


def test_each_kind_has_both_forms_and_names_are_unique():
    full, small = catalog.full_cases(), catalog.small_cases()
    assert set(catalog.kinds(full)) == set(catalog.kinds(small))
    names = [case.name for case in (*full, *small)]
    assert len(names) == len(set(names))
