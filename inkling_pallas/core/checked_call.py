"""A call of the operator, checked: its arguments judged, its backend chosen, its plan compared with what it is for."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inkling_pallas.core.buckets import bucket_max_seqlen_q
from inkling_pallas.core.describe import one_line_repr
from inkling_pallas.core.devices import Place, place_of, spread
from inkling_pallas.core.dispatch import Choice, choose, complete_config, kernels_of, load_backend, usual_card
from inkling_pallas.core.errors import int32_array, refuse, require_plain, static_bool
from inkling_pallas.core.paged_cache import unpack_cache
from inkling_pallas.core.problem import Lengths, Operands, Problem, make_problem
from inkling_pallas.core.sheared_layout import ShearedLogits

_ONE_PLAN = "Make one plan_batch per kind of layer."


@functools.partial(jax.tree_util.register_dataclass, data_fields=["work"], meta_fields=["problem", "backend", "config"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What the layers of one kind share in a step, a pytree; made by `plan_batch`, opaque to the caller."""

    work: Any
    problem: Problem
    backend: str
    config: Any
    __repr__ = one_line_repr


class Call(NamedTuple):
    """A checked call."""

    problem: Problem
    choice: Choice
    operands: Operands
    lengths: Lengths
    plan: BatchPlan | None
    interpret: bool
    spread: str | None
    place: Place
    takes_either: bool  # the choice in a program for an NVIDIA GPU, `elsewhere()` in any other

    def elsewhere(self) -> Choice:
        """Returns the choice in a program for another device."""
        return Choice(backend="portable", config=load_backend("portable").choose_config(self.problem))


def check_call(arguments: Mapping[str, Any]) -> Call:
    """Checks the arguments of a call and chooses its backend.

    All that shapes and static arguments decide is kept for the next call that has the same, so that an eager call costs
    the host little.
    """
    key_cache, value_cache, layout = unpack_cache(arguments["key_cache"], arguments["value_cache"])
    arguments = {**arguments, "key_cache": key_cache, "value_cache": value_cache}
    for name in (*Operands._fields, *Lengths._fields):
        _require_plain(name, arguments[name])
    arguments["block_table"] = int32_array("block_table", arguments["block_table"])
    operands = Operands(*(_as_array(arguments[name]) for name in Operands._fields))
    lengths = Lengths(*(int32_array(name, arguments[name]) for name in Lengths._fields))
    static = _Static(*(arguments[name] for name in _Static._fields))
    plan, interpret = arguments["plan"], static_bool("interpret", arguments["interpret"])
    if plan is not None and not isinstance(plan, BatchPlan):
        raise refuse("plan", "be a BatchPlan or None", type(plan).__name__, _ONE_PLAN)
    place = place_of((*operands, *lengths))
    planned = None if plan is None else _planned(plan, static.backend, interpret, place)
    no_kernel = spread(operands._asdict())
    shapes = (Operands(*map(_shape_of, operands)), Lengths(*map(_shape_of, lengths)))
    facts = (*shapes, layout, static, planned, no_kernel, place.device)
    try:
        # 1, 1.0 and True are equal, but not all of them are right, so types count; so does what runs on the device.
        problem, choice = _decide(*facts, (_types_of(static), kernels_of(place.device)))
    except TypeError:  # something wrong cannot be hashed
        problem, choice = _decide.__wrapped__(*facts, None)
    takes_either = place.is_guess and static.backend == "auto" and choice.backend != "portable" and not interpret
    return Call(problem, choice, operands, lengths, plan, interpret, no_kernel, place, takes_either)


class _Static(NamedTuple):
    """The static arguments of a call."""

    max_seqlen_q: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    rel_extent: Any
    num_splits: Any
    out_dtype: Any
    return_lse: Any
    backend: Any
    config: Any


class _Planned(NamedTuple):
    """What a plan was made for."""

    problem: Problem
    backend: str
    config: Any
    is_used: bool


def _planned(plan: BatchPlan, backend: Any, interpret: bool, place: Place) -> _Planned:
    """Returns what a plan was made for; arrays that are on another device than its kernel's do without it by "auto"."""
    has_kernel = plan.backend == "portable" or interpret or place.is_guess or plan.backend in kernels_of(place.device)
    return _Planned(plan.problem, plan.backend, plan.config, is_used=backend != "auto" or has_kernel)


class _Shape(NamedTuple):
    """What is known of an array without its contents."""

    shape: tuple[int, ...]
    dtype: Any


def _shape_of(value: Any) -> Any:
    if isinstance(value, ShearedLogits):
        return dataclasses.replace(value, table=_shape_of(value.table), shifts=_shape_of(value.shifts))
    return _Shape(value.shape, value.dtype) if hasattr(value, "shape") and hasattr(value, "dtype") else value


def _types_of(static: _Static) -> tuple[Any, ...]:
    window = static.window_size if isinstance(static.window_size, tuple) else ()
    return (*map(type, static), *map(type, window))


@functools.lru_cache(maxsize=4096)
def _decide(
    operands: Operands,
    lengths: Lengths,
    layout: str,
    static: _Static,
    planned: _Planned | None,
    no_kernel: str | None,
    device: Any,
    key: Any,
) -> tuple[Problem, Choice]:
    """Returns the problem and the choice of a call; of arrays only shapes and dtypes count."""
    del key
    *of_problem, backend, config = static
    names = _Static._fields[: len(of_problem)]
    problem = make_problem(
        operands, lengths, layout=layout, bucket=bucket_max_seqlen_q, **dict(zip(names, of_problem, strict=True))
    )
    if planned is not None:
        _require_fitting_plan(planned, problem, backend, config, device)
        if planned.is_used:
            backend, config = planned.backend, planned.config
    return problem, choose(problem, backend, config, no_kernel, device)


def _require_plain(name: str, value: Any) -> None:
    """Raises ValueError for what is no array of jax or NumPy, or of no fixed shape."""
    if isinstance(value, ShearedLogits):
        require_plain(f"{name}.table", value.table)
        require_plain(f"{name}.shifts", value.shifts)
    else:
        require_plain(name, value)


def _as_array(value: Any) -> Any:
    """Makes jax.Arrays of NumPy arrays, so that both hit the same compiled function."""
    if isinstance(value, ShearedLogits):
        return dataclasses.replace(value, table=_as_array(value.table), shifts=_as_array(value.shifts))
    return jnp.asarray(value) if type(value).__module__ == "numpy" else value


def planned_problem(problem: Problem) -> Problem:
    """Returns the problem without what a plan does not depend on, so that one plan fits calls that differ there."""
    return dataclasses.replace(problem, softmax_scale=1.0, out_dtype=problem.dtype, return_lse=False)


def _require_fitting_plan(planned: _Planned, problem: Problem, backend: str, config: Any, device: Any) -> None:
    """Raises ValueError where a plan was made for another kind of call."""
    call = planned_problem(problem)
    for field in dataclasses.fields(Problem):
        made, wanted = getattr(planned.problem, field.name), getattr(call, field.name)
        if made != wanted:
            raise refuse("plan", f"be made for {field.name} = {wanted}", made, _ONE_PLAN)
    if backend not in ("auto", planned.backend):
        raise refuse("plan", f"be made for backend {backend!r}", repr(planned.backend), _ONE_PLAN)
    if config is not None and complete_config(config, usual_card(planned.backend, device)) != planned.config:
        raise refuse("plan", f"be made for config {config}", planned.config, _ONE_PLAN)
