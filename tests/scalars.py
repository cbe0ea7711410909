"""Runs jnp arithmetic on int32 scalars, loops and branches included, on Python's own ints: nothing compiles."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np


def _div(x: int, y: int) -> int:
    """Divides as XLA does, towards zero."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _slice(array: np.ndarray, *starts: int, slice_sizes: tuple[int, ...]) -> np.ndarray:
    firsts = [min(max(i, 0), size - n) for i, size, n in zip(starts, array.shape, slice_sizes, strict=True)]
    return array[tuple(slice(i, i + n) for i, n in zip(firsts, slice_sizes, strict=True))]


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _div, "rem": lambda x, y: x - _div(x, y) * y,
    "max": max, "min": min, "clamp": lambda low, x, high: min(max(x, low), high),
    "and": operator.and_, "or": operator.or_,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "select_n": lambda which, *cases: cases[which],
    "convert_element_type": lambda x, new_dtype, **_: new_dtype.type(x).item(),
    "broadcast_in_dim": lambda x, **_: x,
    "slice": lambda x, start_indices, limit_indices, **_: x[tuple(map(slice, start_indices, limit_indices))],
    "dynamic_slice": _slice,
    "squeeze": lambda x, **_: x.item(),
}  # fmt: skip
_TAKES_PARAMETERS = {"convert_element_type", "broadcast_in_dim", "slice", "dynamic_slice", "squeeze"}

_call_host = jax.extend.core.Primitive("call_host")
_call_host.multiple_results = True
_call_host.def_abstract_eval(lambda *_, function: [])


def call_host(function: Callable[..., None], *values: Any) -> None:
    """Calls function(*values) with ints each time that what was traced comes to this place."""
    _call_host.bind(*values, function=function)


def traced(function: Callable[..., Any], *examples: Any) -> Callable[..., list[Any]]:
    """Returns a function of arguments like the examples, arrays and int32 scalars, that gives the leaves of the result.

    It raises KeyError for an operation that has no counterpart here.
    """
    closed = jax.make_jaxpr(function)(*examples)
    return lambda *arguments: _evaluate(closed, [_plain(x) for x in jax.tree.leaves(arguments)])


def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Returns the leaves of function(*arguments), see `traced`."""
    return traced(function, *arguments)(*arguments)


def _plain(x: Any) -> Any:
    array = np.asarray(x)
    return array if array.ndim else array.item()


def _evaluate(closed: Any, words: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.invars, words, strict=True))
    values |= {var: _plain(x) for var, x in zip(jaxpr.constvars, closed.consts, strict=True)}

    def read(atom: Any) -> Any:
        return _plain(atom.val) if isinstance(atom, jax.extend.core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        results = _apply(eqn.primitive.name, eqn.params, [read(atom) for atom in eqn.invars])
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(name: str, params: dict[str, Any], operands: list[Any]) -> list[Any]:
    if name in ("jit", "pjit"):
        return _evaluate(params["jaxpr"], operands)
    if name == "cond":
        return _evaluate(params["branches"][operands[0]], operands[1:])
    if name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        state = operands[second:]
        while _evaluate(params["cond_jaxpr"], operands[:first] + state)[0]:
            state = _evaluate(params["body_jaxpr"], operands[first:second] + state)
        return state
    if name == "call_host":
        params["function"](*operands)
        return []
    return [_OPERATIONS[name](*operands, **(params if name in _TAKES_PARAMETERS else {}))]
