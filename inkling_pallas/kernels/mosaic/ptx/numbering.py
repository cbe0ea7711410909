"""Kernels lower in two thirds of the time: a module's values are numbered once for a sort, not once for each of them.

The layout inference of jax 0.11 sorts the values of a kernel by the names that they are printed with, and MLIR numbers
the whole module to print one operation. Here it is numbered once for each sort. The names are the same, and so is the
code. jax 0.12 does not print them.
"""

import functools
import io
import threading
from typing import Any

import jax
from jax.experimental.mosaic.gpu import constraints, layout_inference
from jaxlib.mlir import ir

_SORT = "compute_transitively_equal_vars"
_now = threading.local()  # .states: of the sort that runs on this thread, a list of no or one numbered module


def number_once() -> None:
    """Lets jax 0.11 number once for each sort; without effect on any other, and the second time."""
    site, sort = getattr(layout_inference, "ValueSite", None), getattr(constraints, _SORT, None)
    if jax.__version_info__ >= (0, 12) or site is None or sort is None or hasattr(sort, "__wrapped__"):
        return
    print_alone = site.__str__

    @functools.wraps(sort)
    def sort_numbered(system: Any) -> Any:
        _now.states = []
        try:
            return sort(system)
        finally:
            _now.states = None

    def name_of(value: Any) -> str:
        states = getattr(_now, "states", None)
        if states is None:
            return print_alone(value)
        if not states:
            states.append(ir.AsmState(_module_of(value.operation)))
        return print_alone(_Numbered(value, states[0]))

    setattr(constraints, _SORT, sort_numbered)
    site.__str__ = name_of


class _Numbered:
    """A value of which jax prints the operation by a numbered module."""

    def __init__(self, value: Any, state: ir.AsmState) -> None:
        self.type, self.index = value.type, value.index
        self._value, self._state = value, state

    @property
    def operation(self) -> str:
        text = io.StringIO()
        self._value.operation.operation.print(self._state, file=text)
        return text.getvalue()


def _module_of(operation: Any) -> ir.Operation:
    """Returns the outermost operation around one."""
    operation = operation.operation
    while operation.parent is not None:
        operation = operation.parent.operation
    return operation
