"""The kernels in the GPU interpreter, race detector on, with a config of the test's choice."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.checked_call import check_call
from inkling_pallas.kernels import hopper
from inkling_pallas.testing import assert_rows_close
from inkling_pallas.testing.cases import Case, build
from inkling_pallas.testing.reference import reference_rel_attention

LIMITS = {"bfloat16": 6e-3, "float16": 1.5e-3}
_LEFT_OUT = ("num_splits", "out_dtype", "plan", "config", "kv_offset", "total_seqlens", "out")


def attend(arguments: dict[str, Any], config: Any, *, kernel: Any = hopper, **overrides: Any) -> Any:
    """Runs the kernels of a call; returns what `attend` of the module `kernel` returns, as NumPy."""
    checked = _check(arguments, kernel, overrides)
    # All kernels in one computation: what is queued behind a kernel meanwhile can keep the interpreter from going on.
    return jax.tree.map(np.asarray, jax.jit(_run(kernel, checked.problem, config))(checked.operands, checked.lengths))


def compiled(arguments: dict[str, Any], config: Any, *, kernel: Any = hopper) -> Any:
    """Compiles the kernels of a call; returns a function of calls that differ from it in what their arrays hold."""
    checked = _check(arguments, kernel, {})
    run = jax.jit(_run(kernel, checked.problem, config)).lower(checked.operands, checked.lengths).compile()

    def attend(arguments: dict[str, Any]) -> Any:
        checked = _check(arguments, kernel, {})
        return jax.tree.map(np.asarray, run(checked.operands, checked.lengths))

    return attend


def _check(arguments: dict[str, Any], kernel: Any, overrides: dict[str, Any]) -> Any:
    given = {**dict.fromkeys(_LEFT_OUT), "causal": True, "return_lse": True, **arguments, "backend": "portable"}
    checked = check_call({**given, "interpret": False, **overrides})
    assert kernel.unsupported(checked.problem) is None
    return checked


def _run(kernel: Any, problem: Any, config: Any) -> Any:
    interpreter = plgpu.InterpretGPUParams(detect_races=True)

    def run(operands: Any, lengths: Any) -> Any:
        return kernel.attend(problem, config, operands, kernel.plan(problem, config, lengths, interpreter), interpreter)

    return run


def assert_right(results: Any, arguments: dict[str, Any], capfd: Any, limit: float) -> None:
    """Compares (out, lse) with the oracle, and fails where the interpreter has told of a race."""
    out, lse = results
    expected, expected_lse = reference_rel_attention(**{**arguments, "return_lse": True})
    assert_rows_close(out, expected, limit=limit, actual_lse=lse, expected_lse=expected_lse)
    assert "RACE" not in "".join(capfd.readouterr())


def assert_writes_into_out(call: Any, q_len: int) -> None:
    """Asserts that a kernel writes float32 results into the array given as `out`, rows of no sequence included."""
    facts: Any = {"num_heads": 8, "num_kv_heads": 1, "padding_rows": 1}
    small = build(Case(name="out", kind="interpreter", q_lens=(q_len,), kv_lens=(70,), **facts))
    out = jnp.full(small["q"].shape, jnp.nan, jnp.float32)
    actual, lse = call(small, out=out, out_dtype="float32", return_lse=False)
    assert lse is None
    assert actual.dtype == np.float32
    assert_rows_close(actual, reference_rel_attention(**small), limit=LIMITS["bfloat16"])


def assert_bad_ids_spoil_only_their_own_sequence(call: Any, q_lens: tuple[int, int]) -> None:
    """Asserts that page ids outside the pool, in the first of two sequences, change nothing in the second."""
    two = build(Case(name="ids", kind="interpreter", q_lens=q_lens, kv_lens=(130, 70), num_heads=8, num_kv_heads=1))
    spoiled = dict(two, block_table=two["block_table"].copy())
    spoiled["block_table"][0, :] = [2**30, -5, 2**31 - 1] * 3
    out, _ = call(spoiled)
    after = q_lens[0]
    assert_rows_close(out[after:], np.asarray(reference_rel_attention(**two))[after:], limit=LIMITS["bfloat16"])
