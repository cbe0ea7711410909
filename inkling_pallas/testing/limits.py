"""Error measures and limits: how far a result may be from the oracle, the same for every test, check and benchmark.

An error is measured per output row (one token, one head): the 2-norm over head_dim of the difference over that of the
reference.
"""

from typing import Any

import numpy as np

from inkling_pallas.testing.reference import evaluate

# What rounding alone costs a row of these dtypes; a limit is never below it.
ERROR_FLOORS = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}
LSE_LIMIT = 5e-3
LSE_LIMIT_FLOAT32 = 1e-5


def row_errors(actual: Any, expected: Any) -> np.ndarray:
    """Returns `|actual - expected| / |expected|` per row, float64[...] for inputs [..., head_dim].

    A row whose reference is exactly 0 has error 0 if the result is exactly 0, and infinity otherwise; NaN counts as
    infinity.
    """
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    if actual.shape != expected.shape:
        raise ValueError(
            f"actual must have the shape of expected, {expected.shape}; got {actual.shape}. Compare row by row."
        )
    difference = np.linalg.norm(actual - expected, axis=-1)
    size = np.linalg.norm(expected, axis=-1)
    error = np.where(size > 0, difference / np.where(size > 0, size, 1.0), np.where(difference == 0, 0.0, np.inf))
    return np.where(np.isnan(error), np.inf, error)


def lse_errors(actual: Any, expected: Any, dtype: str) -> np.ndarray:
    """Returns the absolute LSE error over its limit, float64[...].

    It is infinity where exactly one side is -inf.

    The limit is 5e-3 for 16-bit inputs and 1e-5 x max(1, |lse|) for float32.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    empty = np.isneginf(expected)
    finite = np.where(empty, 0.0, expected)
    limit = LSE_LIMIT_FLOAT32 * np.maximum(1.0, np.abs(finite)) if dtype == "float32" else LSE_LIMIT
    with np.errstate(invalid="ignore"):
        error = np.abs(np.where(empty, 0.0, actual) - finite) / limit
    error = np.where(empty, np.where(np.isneginf(actual), 0.0, np.inf), error)
    return np.where(np.isnan(error), np.inf, error)


def error_limit(baseline_errors: Any, dtype: str) -> float:
    """Returns the limit of a case: twice the worst row of the baseline, but not under the dtype's floor."""
    worst = float(np.max(baseline_errors, initial=0.0))
    if not np.isfinite(worst):
        raise ValueError(
            f"the baseline must be finite; got a worst row error of {worst}. The inputs overflow this dtype."
        )
    return max(2.0 * worst, ERROR_FLOORS[dtype])


def assert_rows_close(
    actual: Any, expected: Any, *, limit: float | None = None, actual_lse: Any = None, expected_lse: Any = None
) -> None:
    """Raises AssertionError unless every row of a result is close to the reference.

    Args:
      actual: float[..., head_dim], a result.
      expected: float64 of the same shape, from `reference_rel_attention`.
      limit: largest row error; None takes the floor of the result's dtype: 4e-3 bfloat16, 1e-3 float16, 1e-5 float32.
      actual_lse: float32[...], optional, compared with `expected_lse`: absolute 5e-3 (16 bit) or 1e-5 x max(1, |lse|).
      expected_lse: its reference.

    Raises:
      AssertionError: naming the worst row, its error, the limit and how many rows are over it.
    """
    dtype = np.dtype(actual.dtype).name
    limit = ERROR_FLOORS.get(dtype, ERROR_FLOORS["float32"]) if limit is None else limit
    _assert_below(row_errors(actual, expected), limit, "row error")
    if actual_lse is not None:
        _assert_below(lse_errors(actual_lse, expected_lse, dtype), 1.0, "LSE error over its limit")


def _assert_below(errors: np.ndarray, limit: float, what: str) -> None:
    over = errors > limit
    if over.any():
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(errors), errors.shape))
        raise AssertionError(
            f"{what} {errors[worst]:.3g} at row {worst} is over the limit {limit:.3g}; {over.sum()} of {over.size} are."
        )


def baseline_rel_attention(*args: Any, **kwargs: Any) -> np.ndarray:
    """Returns the formula at the inputs' precision: what a plain dense implementation would give.

    Operands in the inputs' dtype, float32 products, scores and softmax, weights and output rounded to the inputs'
    dtype. Arguments as in `reference_rel_attention`.

    Returns:
      float64[n, num_heads, head_dim], values of the inputs' dtype.
    """
    return evaluate(_attend_rounded, *args, **kwargs)[0]


def _attend_rounded(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, bias: np.ndarray, visible: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns attention of some rows of one sequence; a product of two 16-bit floats is exact in float32."""
    dtype = q.dtype
    q, keys, values, bias = (x.astype(np.float32) for x in (q, keys, values, bias))
    rows, num_heads, head_dim = q.shape
    shape = (rows, keys.shape[1], num_heads // keys.shape[1], -1)
    scores = q.reshape(shape).transpose(1, 2, 0, 3) @ keys.transpose(1, 2, 0)[:, None] * np.float32(scale)
    scores = np.where(visible, scores + bias.reshape(shape).transpose(1, 2, 0, 3), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    top = np.where(np.isneginf(top), np.float32(0), top)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / np.where(total == 0, np.float32(1), total)).astype(dtype).astype(np.float32)
    out = (weights @ values.transpose(1, 0, 2)[:, None]).astype(dtype).astype(np.float64)
    return out.transpose(2, 0, 1, 3).reshape(rows, num_heads, head_dim), np.zeros((rows, num_heads))
