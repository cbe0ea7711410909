"""Numbering once for a sort changes the time of lowering alone."""

from unittest import mock

import pytest
from jax.experimental.mosaic.gpu import constraints, layout_inference
from jaxlib.mlir import ir
from lowered import lower, make_problem

from inkling_pallas.kernels.mosaic.ptx import numbering

pytestmark = [pytest.mark.lowering, pytest.mark.full]  # full: on jax 0.11, which it is for
SORT = "compute_transitively_equal_vars"


def test_names_are_those_that_jax_prints_and_a_sort_numbers_once(monkeypatch):
    quick, sort = layout_inference.ValueSite.__str__, getattr(constraints, SORT)
    names, sorts, numbered = [], [], []

    def counted(system):
        sorts.append(system)
        return sort(system)

    def named(value):
        state, numbering._now.states = getattr(numbering._now, "states", None), None
        try:
            alone = quick(value)
        finally:
            numbering._now.states = state
        names.append((quick(value), alone))
        return names[-1][0]

    class State(ir.AsmState):
        def __init__(self, operation):
            numbered.append(operation)
            super().__init__(operation)

    monkeypatch.setattr(constraints, SORT, counted)
    monkeypatch.setattr(layout_inference.ValueSite, "__str__", named)
    with mock.patch.object(numbering.ir, "AsmState", State):
        lower(make_problem(16, 2, batch=3))
    assert len(names) > 50
    assert all(once == alone for once, alone in names)
    assert 0 < len(numbered) <= len(sorts)


def test_a_second_import_changes_nothing():
    sort = getattr(constraints, SORT)
    assert sort.__wrapped__.__module__.startswith("jax.")
    numbering.number_once()
    assert getattr(constraints, SORT) is sort


def test_a_jax_that_sorts_otherwise_is_left_alone(monkeypatch):
    monkeypatch.delattr(constraints, SORT)
    numbering.number_once()
    assert not hasattr(constraints, SORT)
