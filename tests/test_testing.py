"""The error measures: what they see, and that NaN, empty rows and infinities never pass."""

import numpy as np
import pytest

from inkling_pallas.testing import (
    ERROR_FLOORS,
    assert_rows_close,
    baseline_rel_attention,
    error_limit,
    lse_errors,
    row_errors,
)
from inkling_pallas.testing.cases import Case, build
from inkling_pallas.testing.reference import reference_rel_attention

pytestmark = pytest.mark.host


def test_row_errors():
    expected = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    actual = np.array([[3.0, 4.5], [0.0, 0.0], [0.0, 1e-30], [np.nan, 0.0]])
    np.testing.assert_allclose(row_errors(actual, expected), [0.1, 0.0, np.inf, np.inf])
    with pytest.raises(ValueError, match="actual must have the shape of expected"):
        row_errors(actual[:2], expected)


def test_lse_errors():
    expected = np.array([1.0, -np.inf, -np.inf, 2.0, 100.0])
    actual = np.array([1.0 + 5e-3, -np.inf, 0.0, -np.inf, np.nan])
    np.testing.assert_allclose(lse_errors(actual, expected, "bfloat16"), [1.0, 0.0, np.inf, np.inf, np.inf])
    np.testing.assert_allclose(lse_errors([100.001], [100.0], "float32"), [1.0], rtol=1e-6)


def test_error_limit_has_a_floor_and_refuses_a_broken_baseline():
    assert error_limit([1e-9], "bfloat16") == ERROR_FLOORS["bfloat16"] == 4e-3
    assert error_limit([3e-3], "bfloat16") == 6e-3
    assert error_limit([], "float16") == 1e-3
    with pytest.raises(ValueError, match="the baseline must be finite"):
        error_limit([np.inf], "bfloat16")


def test_assert_rows_close_names_the_worst_row():
    expected = np.ones((3, 2, 4))
    actual = expected.astype(np.float32)
    assert_rows_close(actual, expected)
    actual[1, 1] = 1.5
    message = r"row error 0.5 at row \(1, 1\) is over the limit 1e-05; 1 of 6 are."
    with pytest.raises(AssertionError, match=message):
        assert_rows_close(actual, expected)
    with pytest.raises(AssertionError, match="LSE error over its limit"):
        assert_rows_close(
            expected.astype(np.float32), expected, actual_lse=np.zeros((3, 2)), expected_lse=np.ones((3, 2))
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_baseline_is_as_bad_as_its_dtype(dtype):
    call = build(Case(name="baseline", kind="testing", q_lens=(5, 1), kv_lens=(70, 300), dtype=dtype))
    error = row_errors(baseline_rel_attention(**call), reference_rel_attention(**call)).max()
    assert ERROR_FLOORS[dtype] / 1e3 < error < 2 * ERROR_FLOORS[dtype]


def test_the_oracle_takes_tokens():
    call = build(Case(name="tokens", kind="testing", q_lens=(5, 0, 3), kv_lens=(70, 9, 300), padding_rows=2))
    whole, whole_lse = reference_rel_attention(**call, return_lse=True)
    tokens = np.array([9, 0, 4, 6])
    some, some_lse = reference_rel_attention(**call, return_lse=True, tokens=tokens)
    np.testing.assert_allclose(some, whole[tokens], atol=1e-13)
    np.testing.assert_allclose(some_lse, whole_lse[tokens], atol=1e-13)


def test_the_oracle_against_one_row_written_out():
    """One head, two keys, worked by hand: logits 0.5 * 2 + 0.25 and 0.5 * -1 + 0.75."""
    pages = np.zeros((2, 2, 1, 16), np.float32)
    pages[1, 0, 0, 0], pages[1, 1, 0, 0] = -1.0, 2.0
    values = np.zeros_like(pages)
    values[1, 0, 0, 1], values[1, 1, 0, 1] = 10.0, 20.0
    q = np.zeros((1, 1, 16), np.float32)
    q[0, 0, 0] = 1.0
    out, lse = reference_rel_attention(
        q,
        pages,
        values,
        block_table=np.array([[1]]),
        cache_seqlens=np.array([2]),
        cu_seqlens_q=np.array([0, 1]),
        softmax_scale=0.5,
        causal=True,
        window_size=(-1, -1),
        rel_extent=2,
        rel_logits=np.array([[[0.25, 0.75]]], np.float32),
        return_lse=True,
    )
    logits = np.array([0.25, 1.25])
    weights = np.exp(logits) / np.exp(logits).sum()
    assert out[0, 0, 1] == pytest.approx(weights @ [10.0, 20.0])
    assert lse[0, 0] == pytest.approx(np.log(np.exp(logits).sum()))
