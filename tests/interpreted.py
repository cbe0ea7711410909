"""The kernels in the GPU interpreter, race detector on, with a config of the test's choice."""

from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.call import check_call
from inkling_pallas.kernels import hopper
from inkling_pallas.reference import reference_rel_attention
from inkling_pallas.testing import assert_rows_close

LIMITS = {"bfloat16": 6e-3, "float16": 1.5e-3}
_LEFT_OUT = ("num_splits", "out_dtype", "plan", "config", "kv_offset", "total_seqlens", "out")


def attend(arguments: dict[str, Any], config: Any, *, kernel: Any = hopper, **overrides: Any) -> Any:
    """Runs the kernels of a call; returns what `attend` of the module `kernel` returns, as NumPy."""
    given = {**dict.fromkeys(_LEFT_OUT), "causal": True, "return_lse": True, **arguments, "backend": "portable"}
    checked = check_call({**given, "interpret": False, **overrides})
    problem = checked.problem
    assert kernel.unsupported(problem) is None
    interpreter = plgpu.InterpretGPUParams(detect_races=True)
    plan = kernel.plan(problem, config, checked.lengths, interpreter)
    return jax.tree.map(np.asarray, kernel.attend(problem, config, checked.operands, plan, interpreter))


def assert_right(results: Any, arguments: dict[str, Any], capfd: Any, limit: float) -> None:
    """Compares (out, lse) with the oracle, and fails where the interpreter has told of a race."""
    out, lse = results
    expected, expected_lse = reference_rel_attention(**{**arguments, "return_lse": True})
    assert_rows_close(out, expected, limit=limit, actual_lse=lse, expected_lse=expected_lse)
    assert "RACE" not in "".join(capfd.readouterr())
