"""Times the sheared layout on a workload, after comparing it with the plain one.

Its producers beside einsum and a copy, attention on both layouts, and both ways from the relative query to the result.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.attention import inkling_rel_attention
from inkling_pallas.bench.clocks import Clock, time_calls
from inkling_pallas.bench.workloads import device_inputs
from inkling_pallas.core.sheared_layout import shear_rows, sheared_width
from inkling_pallas.relative_bias import relative_logits, shear, sheared_relative_logits
from inkling_pallas.testing.cases import Case
from inkling_pallas.testing.limits import ERROR_FLOORS, row_errors

_D_REL = 16
_LENGTHS = ("cu_seqlens_q", "cache_seqlens")
# Sums of 16 products in another order: the neighbouring bfloat16, or that much where the terms cancel.
_NEIGHBOUR, _CANCELLED = 2.0**-7, 1e-5
# Plain and sheared attention on biases that differ by a rounding, against each other.
_ROW_LIMITS = {name: 2 * floor for name, floor in ERROR_FLOORS.items()}


def measure(case: Case, backend: str, clock: Clock) -> dict[str, Any]:
    """Returns what the sheared layout costs and saves in a workload, for a results file.

    Args:
      case: the workload.
      backend: of attention; the producers are kernels where it is "hopper".
      clock: from `make_clock`.

    Returns:
      `calls`: for each call the times, and for producers the bytes they must move and the floor, which is those bytes
      at the rate of `copy`; `differs`: elements that differ from the plain way; `reason`: what is wrong, or None.
    """
    inputs = _inputs(case)
    calls = _calls(inputs, backend)
    differs, reason = _compare(calls, inputs, case.dtype)
    result: dict[str, Any] = {"differs": differs, "reason": reason, "calls": {}}
    if reason is not None:
        return result
    timings = time_calls({name: functools.partial(_call, call, inputs) for name, call in calls.items()}, clock)
    rate = 2 * inputs["sheared"].table.nbytes / timings["copy"].us
    needed = _bytes(case)
    for name, timing in timings.items():
        entry: dict[str, Any] = {key: round(value, 3) for key, value in dataclasses.asdict(timing).items()}
        if name in needed:
            floor = needed[name] / rate
            entry |= {"bytes": needed[name], "floor_us": round(floor, 3), "over_floor": round(timing.us / floor, 4)}
        result["calls"][name] = entry
    result["project_over_einsum"] = round(timings["project"].us / timings["einsum"].us, 4)
    return result


def add_to(results: dict[str, Any], case: Case, clock: Clock) -> None:
    """Fills in, as `sheared`, what a case does with the bias in that layout; what is wrong there makes it red."""
    try:
        results["sheared"] = measure(case, results["backend"], clock)
    except Exception as error:  # whatever a kernel raises, the other cases are still to be timed
        line = (str(error).strip().splitlines() or [""])[0][:300]
        results["sheared"] = {"differs": {}, "reason": f"{type(error).__name__}: {line}", "calls": {}}
    results["red"] |= results["sheared"]["reason"] is not None


def table_of(cases: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of the table of all calls."""
    rows = []
    for case in cases:
        measured = case.get("sheared", {"reason": "not started", "calls": {}})
        if measured["reason"] is not None:
            rows.append([case["name"], f"RED: {measured['reason']}", "-", "-", "-"])
        for name, entry in measured["calls"].items():
            over = f"{entry['over_floor']:.2f}" if "over_floor" in entry else "-"
            rows.append(
                [case["name"], name, f"{entry['us']:,.1f}", f"{entry['us_min']:,.1f}..{entry['us_max']:,.1f}", over]
            )
    return ["case", "call", "us", "spread", "over floor"], rows


def _inputs(case: Case) -> dict[str, Any]:
    """Returns the arguments of the operator with, as `sheared`, its bias sheared, and `r` and `proj`."""
    inputs = device_inputs(case, seed=0)
    keys = jax.random.split(jax.random.key(1))
    r = jax.random.normal(keys[0], (case.num_tokens, case.num_heads, _D_REL), jnp.float32).astype(case.dtype)
    proj = (jax.random.normal(keys[1], (_D_REL, case.rel_extent), jnp.float32) / 4).astype(case.dtype)
    sheared = jax.jit(shear)(inputs["rel_logits"], **{name: inputs[name] for name in _LENGTHS})
    return {**inputs, "r": r, "proj": proj, "sheared": sheared}


def _calls(inputs: dict[str, Any], backend: str) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
    """Returns the jitted calls by name; each takes the arrays of `inputs`."""
    producer = "hopper" if backend == "hopper" else "portable"
    static = {name: value for name, value in inputs.items() if not isinstance(jax.tree.leaves(value)[0], jax.Array)}
    operands = ("q", "key_cache", "value_cache", "block_table", *_LENGTHS)

    def lengths(x: Mapping[str, Any]) -> dict[str, Any]:
        return {name: x[name] for name in _LENGTHS}

    def attend(x: Mapping[str, Any], rel_logits: Any) -> Any:
        given = {name: x[name] for name in operands}
        return inkling_rel_attention(**given, **static, rel_logits=rel_logits, backend=backend)

    def project(x: Mapping[str, Any]) -> Any:
        return sheared_relative_logits(x["r"], x["proj"], **lengths(x), backend=producer)

    calls: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "copy": lambda x: -x["sheared"].table,
        "einsum": lambda x: relative_logits(x["r"], x["proj"]),
        "shear": lambda x: shear(x["rel_logits"], **lengths(x), backend=producer),
        "project": project,
        "attend_plain": lambda x: attend(x, x["rel_logits"]),
        "attend_sheared": lambda x: attend(x, x["sheared"]),
        "plain_from_r": lambda x: attend(x, relative_logits(x["r"], x["proj"])),
        "sheared_from_r": lambda x: attend(x, project(x)),
    }
    return {name: jax.jit(call) for name, call in calls.items()}


def _call(call: Callable[[Mapping[str, Any]], Any], inputs: dict[str, Any], number: int) -> Any:
    """Runs a call; every one takes the same inputs, which the flush before it has driven out of the caches."""
    del number
    return call({name: value for name, value in inputs.items() if isinstance(jax.tree.leaves(value)[0], jax.Array)})


def _compare(calls: Mapping[str, Any], inputs: dict[str, Any], dtype: str) -> tuple[dict[str, int], str | None]:
    """Returns how many elements of each call differ from the plain way, and what is wrong, if anything."""
    run = {name: functools.partial(_call, call, inputs, 0) for name, call in calls.items()}
    differs, wrong = {}, []
    differs["shear"] = int(jnp.count_nonzero(run["shear"]().table != inputs["sheared"].table))
    if differs["shear"]:
        wrong.append(f"shear has {differs['shear']} elements other than shear_rows")
    made = run["project"]()
    expected = jax.jit(shear_rows)(run["einsum"](), made.shifts)
    differs["project"] = int(jnp.count_nonzero(made.table != expected))
    far = int(jax.jit(_count_far)(made.table, expected))
    if far:
        wrong.append(f"project has {far} elements further than a rounding from einsum")
    if wrong:
        return differs, "; ".join(wrong)
    for plain, sheared in (("attend_plain", "attend_sheared"), ("plain_from_r", "sheared_from_r")):
        results = [np.asarray(run[name](), np.float64) for name in (plain, sheared)]
        differs[sheared] = int(np.count_nonzero(results[0] != results[1]))
        worst = float(np.max(row_errors(results[1], results[0]), initial=0.0))
        if not worst <= _ROW_LIMITS[dtype]:
            wrong.append(f"{sheared} is {worst:.3g} from {plain}")
    return differs, "; ".join(wrong) or None


def _count_far(actual: jax.Array, expected: jax.Array) -> jax.Array:
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    near = jnp.abs(actual - expected) <= _NEIGHBOUR * jnp.abs(expected) + _CANCELLED
    return jnp.count_nonzero(~near)


def _bytes(case: Case) -> dict[str, int]:
    """Returns the bytes that each producer must move."""
    item = np.dtype(jnp.dtype(case.dtype)).itemsize
    rows = case.num_tokens * case.num_heads * item
    plain, sheared, r = rows * case.rel_extent, rows * sheared_width(case.rel_extent), rows * _D_REL
    return {"copy": 2 * sheared, "einsum": r + plain, "shear": plain + sheared, "project": r + sheared}
