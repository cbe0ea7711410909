"""Whether a result may be timed: its rows against the oracle and the baseline, on a bounded number of tokens."""

import dataclasses
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.attention import inkling_rel_attention
from inkling_pallas.bench.workloads import visible_keys
from inkling_pallas.testing.cases import Case
from inkling_pallas.testing.limits import baseline_rel_attention, error_limit, row_errors
from inkling_pallas.testing.reference import reference_rel_attention

JUDGED_TOKENS = 512
_NO_BIAS_EXTENT = 8
_TILES = (64, 128, 256, 512)
# NumPy's matrix products use all cores by themselves, and many callers at once slow each other down.
_CORES_PER_WORKER = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The worst row of a result, the limit for it, and what is wrong, if anything is."""

    row_error: float
    limit: float
    reason: str | None = None

    @property
    def red(self) -> bool:
        """True if the result is wrong."""
        return self.reason is not None


class Judge:
    """Knows what a case's inputs should give; judges any number of results of them."""

    def __init__(self, case: Case, arguments: dict[str, Any]) -> None:
        """Computes oracle and baseline of the judged tokens.

        Args:
          case: the workload.
          arguments: from `workloads.device_inputs`.
        """
        starts = np.cumsum((0, *case.all_q_lens))
        self.tokens = judged_tokens(case)
        workers = max(1, (os.cpu_count() or 1) // _CORES_PER_WORKER)
        futures = []
        with ThreadPoolExecutor(workers) as pool:
            for b in range(len(case.all_q_lens)):
                rows = self.tokens[(self.tokens >= starts[b]) & (self.tokens < starts[b + 1])] - starts[b]
                call = pool.submit(_sequence_on_host, case, arguments, b, rows)
                parts = min(len(rows), -(-2 * workers * len(rows) // max(1, len(self.tokens))))
                futures += [pool.submit(_compute, call, part) for part in np.array_split(rows, max(1, parts))]
            expected, baseline = zip(*(future.result() for future in futures), strict=True)
        self._arguments = arguments
        self._without_bias: jax.Array | None = None
        self._expected = np.concatenate(expected)
        self._limit = error_limit(row_errors(np.concatenate(baseline), self._expected), case.dtype)

    def __call__(self, result: jax.Array) -> Verdict:
        """Returns the verdict on a result [num_tokens, num_heads, head_dim]; its other rows must be finite."""
        return self._verdict(result, self._expected, self._limit)

    def without_bias(self, result: jax.Array) -> Verdict:
        """Returns the verdict on a result without bias, against portable, whose own error doubles the limit."""
        if self._without_bias is None:
            rows = self._arguments["rel_logits"].shape[:2]
            zeros = jnp.zeros((*rows, _NO_BIAS_EXTENT), self._arguments["rel_logits"].dtype)
            call = dict(self._arguments, rel_logits=zeros, rel_extent=_NO_BIAS_EXTENT)
            self._without_bias = inkling_rel_attention(**call, backend="portable")[self.tokens]  # pyright: ignore
        return self._verdict(result, self._without_bias, 2 * self._limit)

    def _verdict(self, result: jax.Array, expected: Any, limit: float) -> Verdict:
        worst = float(row_errors(result[self.tokens], expected).max(initial=0.0))
        reason = None
        if not worst <= limit:
            reason = f"row error {worst:.3g} is over the limit {limit:.3g}"
        elif not bool(jnp.isfinite(result).all()):
            reason = "a row outside the judged tokens is not finite"
        return Verdict(row_error=worst, limit=limit, reason=reason)


def judged_tokens(case: Case, seed: int = 0) -> np.ndarray:
    """Returns the sorted packed rows to judge: all of a small batch, else JUDGED_TOKENS.

    The first and last of each sequence come first, then those at edges of tiles, extent and window, then random ones.
    """
    total = sum(case.q_lens)
    if total <= JUDGED_TOKENS:
        return np.arange(total)
    chosen: dict[int, None] = {}
    starts = np.cumsum((0, *case.all_q_lens))
    lengths = list(zip(starts, case.all_q_lens, case.all_kv_lens, strict=False))
    for start, q_len, _ in lengths:
        chosen.update(dict.fromkeys([int(start), int(start) + q_len - 1] if q_len else []))
    for start, q_len, kv_len in lengths:
        chosen.update(dict.fromkeys(int(start) + row for row in _edge_rows(case, q_len, kv_len) if 0 <= row < q_len))
    chosen.update(dict.fromkeys(np.random.default_rng(seed).permutation(total).tolist()))
    return np.sort(np.array(list(chosen)[:JUDGED_TOKENS]))


def _edge_rows(case: Case, q_len: int, kv_len: int) -> list[int]:
    """Returns rows at the first and last tile edges, and where the first key leaves the extent or the window."""
    rows = [edge + side for tile in _TILES for edge in (tile, (q_len - 1) // tile * tile) for side in (-1, 0)]
    first_pos = kv_len - q_len
    for reach in (case.rel_extent, case.window_size[0] + 1):
        rows += [reach - first_pos + side for side in (-1, 0, 1)]
    return rows


def _sequence_on_host(case: Case, arguments: dict[str, Any], b: int, rows: np.ndarray) -> dict[str, Any]:
    """Returns the call of one sequence as host arrays of what some of its rows read; other rows are zeros.

    K, V and the biases are widened to float32, which changes no value: NumPy holds its lock in work on bfloat16, so
    that threads would wait for each other.
    """
    q_len, kv_len = case.all_q_lens[b], case.all_kv_lens[b]
    first, end = visible_keys(case, kv_len - q_len + rows, kv_len)
    pages = slice(int(first.min(initial=kv_len)) // case.block_size, -(-int(end.max(initial=0)) // case.block_size))
    live = np.asarray(arguments["block_table"])[b, pages]
    table = np.zeros((1, arguments["block_table"].shape[1]), np.int32)
    table[0, pages] = np.arange(len(live))
    call = dict(arguments, block_table=table, cache_seqlens=np.array([kv_len]), cu_seqlens_q=np.array([0, q_len]))
    for name in ("key_cache", "value_cache"):
        call[name] = np.asarray(arguments[name][live]).astype(np.float32)
    start = sum(case.all_q_lens[:b])
    for name, dtype in {"q": case.dtype, "rel_logits": "float32"}.items():
        call[name] = np.zeros((q_len, *arguments[name].shape[1:]), jnp.dtype(dtype))
        call[name][rows] = np.asarray(arguments[name][start + rows])
    return call


def _compute(call: Future[dict[str, Any]], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (oracle, baseline) of some rows of a sequence, float64[rows, num_heads, head_dim]."""
    arguments = call.result()
    out = reference_rel_attention(**arguments, tokens=rows)
    baseline = baseline_rel_attention(**arguments, tokens=rows)
    return np.asarray(out), np.asarray(baseline)
