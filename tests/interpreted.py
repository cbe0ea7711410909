"""Kernels in the GPU interpreter: one compiled program for calls of one shape, from a call's arguments to its results.

A program takes some eight times as long to compile as to run: what differs in the contents of arrays shares one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.checked_call import check_call
from inkling_pallas.testing import assert_rows_close
from inkling_pallas.testing.reference import reference_rel_attention

LIMITS = {"bfloat16": 6e-3, "float16": 1.5e-3}
_LEFT_OUT = ("num_splits", "out_dtype", "plan", "config", "kv_offset", "total_seqlens", "out")
_DEAD_ENTRY = 2**31 - 1
# Axis of each array, what the axis counts, and what is added there: all of it must not matter.
_ROWS: dict[str, tuple[tuple[str, float], ...]] = {
    "q": (("rows", np.nan),),
    "rel_logits": (("rows", np.nan),),
    "cache_seqlens": (("sequences", 0),),
    "block_table": (("sequences", _DEAD_ENTRY), ("entries", _DEAD_ENTRY)),
}


def compiled(arguments: dict[str, Any], config: Any, *, kernel: Any, **overrides: Any) -> Callable[..., Any]:
    """Compiles the kernels of a call; returns a function of calls that differ from it in what their arrays hold."""
    problem, operands, lengths = _check(arguments, kernel, overrides)
    interpreter = plgpu.InterpretGPUParams(detect_races=True)

    # All kernels in one computation: what is queued behind a kernel meanwhile can keep the interpreter from going on.
    @jax.jit
    def run(operands: Any, lengths: Any) -> Any:
        return kernel.attend(problem, config, operands, kernel.plan(problem, config, lengths, interpreter), interpreter)

    program = run.lower(operands, lengths).compile()

    def attend(arguments: dict[str, Any], **overrides: Any) -> Any:
        """Returns what `attend` of the kernel's module returns, as NumPy."""
        own, operands, lengths = _check(arguments, kernel, overrides)
        assert own == problem
        return jax.tree.map(np.asarray, program(operands, lengths))

    return attend


def _check(arguments: dict[str, Any], kernel: Any, overrides: dict[str, Any]) -> tuple[Any, Any, Any]:
    given = {**dict.fromkeys(_LEFT_OUT), "causal": True, "return_lse": True, **arguments, "backend": "portable"}
    checked = check_call({**given, "interpret": False, **overrides})
    assert kernel.unsupported(checked.problem) is None
    return checked.problem, checked.operands, checked.lengths


def alike(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns calls of one shape: rows of no sequence, empty sequences, unused pages and table entries are added."""
    sizes = [_sizes(call) for call in calls]
    most = {name: max(size[name] for size in sizes) for name in sizes[0]}
    return [_padded(call, most) for call in calls]


def _sizes(call: dict[str, Any]) -> dict[str, int]:
    sequences, entries = call["block_table"].shape
    pages = len(jax.tree.leaves(call["key_cache"])[0])
    return {"rows": len(call["q"]), "sequences": sequences, "entries": entries, "pages": pages} | {
        "longest": call["max_seqlen_q"]
    }


def _padded(call: dict[str, Any], most: dict[str, int]) -> dict[str, Any]:
    padded = dict(call, max_seqlen_q=most["longest"])
    for name, axes in _ROWS.items():
        for axis, (what, value) in enumerate(axes):
            padded[name] = _grown(padded[name], axis, most[what], value)
    for name in ("key_cache", "value_cache"):
        padded[name] = jax.tree.map(lambda x: _grown(np.asarray(x), 0, most["pages"], np.nan), padded[name])
    # Ids outside the pool stay outside of it.
    pages, table = _sizes(call)["pages"], padded["block_table"]
    outside = (table >= pages) & (table < _DEAD_ENTRY - most["pages"])
    padded["block_table"] = np.where(outside, table + np.int32(most["pages"] - pages), table)
    offsets = padded["cu_seqlens_q"]
    padded["cu_seqlens_q"] = _grown(offsets, 0, most["sequences"] + 1, offsets[-1])
    return padded


def _grown(x: np.ndarray, axis: int, size: int, value: Any) -> np.ndarray:
    shape = (*x.shape[:axis], size - x.shape[axis], *x.shape[axis + 1 :])
    return np.concatenate([x, np.full(shape, value, x.dtype)], axis)


def assert_right(results: Any, arguments: dict[str, Any], capfd: Any, limit: float) -> None:
    """Compares (out, lse) with the oracle, and fails where the interpreter has told of a race."""
    out, lse = results
    expected, expected_lse = reference_rel_attention(**{**arguments, "return_lse": True})
    assert_rows_close(out, expected, limit=limit, actual_lse=lse, expected_lse=expected_lse)
    assert "RACE" not in "".join(capfd.readouterr())


@contextmanager
def told(**what: Any) -> Iterator[None]:
    """Says, where a comparison fails, which of a program's calls it was."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"with {what}")
        raise


def without_nan(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a call whose caches hold zeros where they held NaN."""
    caches = {name: np.asarray(call[name]) for name in ("key_cache", "value_cache")}
    return call | {name: np.nan_to_num(x.astype(np.float32)).astype(x.dtype) for name, x in caches.items()}


def nothing_written(call: dict[str, Any]) -> jax.Array:
    """Returns an array to give as `out`."""
    return jnp.full(call["q"].shape, jnp.nan, jnp.float32)
