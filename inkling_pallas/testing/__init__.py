"""What decides whether a result is right: the oracle, limits, cases, and the judge that brings them together."""

from inkling_pallas.testing.cases import Case, build
from inkling_pallas.testing.limits import (
    ERROR_FLOORS,
    assert_rows_close,
    baseline_rel_attention,
    error_limit,
    lse_errors,
    row_errors,
)
from inkling_pallas.testing.reference import reference_rel_attention

__all__ = [
    "ERROR_FLOORS",
    "Case",
    "assert_rows_close",
    "baseline_rel_attention",
    "build",
    "error_limit",
    "lse_errors",
    "reference_rel_attention",
    "row_errors",
]
