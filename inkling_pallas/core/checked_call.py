"""A call of the operator, checked: its arguments judged, its backend chosen, its plan compared with what it is for."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inkling_pallas.core.buckets import bucket_max_seqlen_q
from inkling_pallas.core.dispatch import Choice, choose
from inkling_pallas.core.errors import refuse, static_bool
from inkling_pallas.core.paged_cache import unpack_cache
from inkling_pallas.core.problem import Lengths, Operands, Problem, make_problem


@functools.partial(jax.tree_util.register_dataclass, data_fields=["work"], meta_fields=["problem", "backend", "config"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What the layers of one kind share in a step, a pytree; made by `plan_batch`, opaque to the caller."""

    work: Any
    problem: Problem
    backend: str
    config: Any


class Call(NamedTuple):
    """A checked call."""

    problem: Problem
    choice: Choice
    operands: Operands
    lengths: Lengths
    plan: BatchPlan | None
    interpret: bool


def check_call(arguments: Mapping[str, Any]) -> Call:
    """Checks the arguments of a call and chooses its backend."""
    key_cache, value_cache, layout = unpack_cache(arguments["key_cache"], arguments["value_cache"])
    arguments = {**arguments, "key_cache": key_cache, "value_cache": value_cache}
    given = {name: jax.tree.map(_as_array, arguments[name]) for name in (*Operands._fields, *Lengths._fields)}
    operands = Operands(*(given[name] for name in Operands._fields))
    lengths = Lengths(*(given[name] for name in Lengths._fields))
    static_names = (
        "max_seqlen_q",
        "softmax_scale",
        "causal",
        "window_size",
        "rel_extent",
        "num_splits",
        "out_dtype",
        "return_lse",
    )
    problem = make_problem(
        operands, lengths, layout=layout, bucket=bucket_max_seqlen_q, **{name: arguments[name] for name in static_names}
    )
    plan, backend, config = arguments["plan"], arguments["backend"], arguments["config"]
    if plan is not None:
        _require_fitting_plan(plan, problem, backend, config)
        backend, config = plan.backend, plan.config
    return Call(
        problem,
        choose(problem, backend, config),
        operands,
        lengths,
        plan,
        static_bool("interpret", arguments["interpret"]),
    )


def _as_array(value: Any) -> Any:
    """Makes a jax.Array of a NumPy array, so that both hit the same compiled function."""
    return jnp.asarray(value) if type(value).__module__ == "numpy" else value


def planned_problem(problem: Problem) -> Problem:
    """Returns the problem without what a plan does not depend on, so that one plan fits calls that differ there."""
    return dataclasses.replace(problem, softmax_scale=1.0, out_dtype=problem.dtype, return_lse=False)


def _require_fitting_plan(plan: BatchPlan, problem: Problem, backend: str, config: Any) -> None:
    """Raises ValueError where a plan was made for another kind of call."""
    advice = "Make one plan_batch per kind of layer."
    if not isinstance(plan, BatchPlan):
        raise refuse("plan", "be a BatchPlan or None", type(plan).__name__, advice)
    for field in dataclasses.fields(Problem):
        made, wanted = getattr(plan.problem, field.name), getattr(planned_problem(problem), field.name)
        if made != wanted:
            raise refuse("plan", f"be made for {field.name} = {wanted}", made, advice)
    if backend not in ("auto", plan.backend):
        raise refuse("plan", f"be made for backend {backend!r}", repr(plan.backend), advice)
    if config not in (None, plan.config):
        raise refuse("plan", f"be made for config {config}", plan.config, advice)
