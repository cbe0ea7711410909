"""Plain jnp arithmetic on int32 scalars as Mosaic code: one rule then serves the host, XLA and each CUDA thread."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

_COMPARISONS = {
    "lt": arith.CmpIPredicate.slt,
    "le": arith.CmpIPredicate.sle,
    "gt": arith.CmpIPredicate.sgt,
    "ge": arith.CmpIPredicate.sge,
    "eq": arith.CmpIPredicate.eq,
    "ne": arith.CmpIPredicate.ne,
}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": arith.addi,
    "sub": arith.subi,
    "mul": arith.muli,
    "div": arith.divsi,
    "rem": arith.remsi,
    "max": arith.maxsi,
    "min": arith.minsi,
    "and": arith.andi,
    "or": arith.ori,
    "select_n": lambda which, other, chosen: arith.select(which, chosen, other),
    "broadcast_in_dim": lambda x: x,
}


def run(function: Callable[..., Any], *words: Any) -> list[Any]:
    """Returns the leaves of function(*words), where words are int32 values of Mosaic code.

    Raises:
      NotImplementedError: for an operation that has no counterpart here.
    """
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    closed = jax.make_jaxpr(function)(*[scalar] * len(words))
    return _evaluate(closed.jaxpr, closed.consts, words)


def _evaluate(jaxpr: Any, constants: Sequence[Any], words: Sequence[Any]) -> list[Any]:
    values = dict(zip(jaxpr.invars, words, strict=True))
    values |= {var: _constant(x) for var, x in zip(jaxpr.constvars, constants, strict=True)}

    def read(atom: Any) -> Any:
        return _constant(atom.val) if isinstance(atom, jax.extend.core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        results = _apply(eqn, [read(atom) for atom in eqn.invars])
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: Any, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if "jaxpr" in eqn.params:  # A function jitted by jnp.
        inner = eqn.params["jaxpr"]
        return _evaluate(inner.jaxpr, inner.consts, operands)
    if name == "convert_element_type":
        return [arith.extui(_word(), x) if x.type != _word() else x for x in operands]
    if name in _COMPARISONS:
        return [arith.cmpi(_COMPARISONS[name], *operands)]
    if name not in _OPERATIONS:
        raise NotImplementedError(f"Mosaic code of scalars must be of {sorted(_OPERATIONS)}; got {name}.")
    return [_OPERATIONS[name](*operands)]


def _constant(value: Any) -> Any:
    is_bool = jnp.result_type(value) == jnp.bool_
    return utils.c(int(value), ir.IntegerType.get_signless(1) if is_bool else _word())


def _word() -> Any:
    return ir.IntegerType.get_signless(32)
