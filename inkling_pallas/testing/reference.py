"""The oracle: paged relative attention in float64 NumPy, written from the formula, one sequence at a time.

It shares no code with any backend. It trusts its input: check a batch with `check_batch` first.
"""

import collections
import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from inkling_pallas.core.sheared_layout import ShearedLogits

# float64 scores that one step may hold; bounds memory, changes no result.
_SCORES_PER_STEP = 1 << 22


def reference_rel_attention(
    q: Any,
    key_cache: Any,
    value_cache: Any,
    *,
    block_table: Any,
    cache_seqlens: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: Any = None,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    rel_extent: int,
    rel_logits: Any,
    kv_offset: Any = None,
    total_seqlens: Any = None,
    plan: Any = None,
    num_splits: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    backend: Any = None,
    config: Any = None,
    interpret: Any = None,
    tokens: Any = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Returns attention with a relative bias, computed in float64 from the formula.

    For packed row t, which is row i of sequence b, and key j of its table::

        dist   = (total_seqlens[b] - q_len + i) - (kv_offset[b] + j)
        bias   = rel_logits[t, h, dist] if 0 <= dist < rel_extent else 0
        logit  = softmax_scale * dot(q[t, h], k[j, h // group]) + bias
        masked : dist < 0 if causal; dist > left or -dist > right; j on a page id outside the pool
        out    = softmax_j(logit) @ v

    Args:
      q: float[num_tokens, num_heads, head_dim].
      key_cache: float[num_blocks, block_size, num_kv_heads, head_dim], or a PagedKVCache.
      value_cache: like key_cache; None with a PagedKVCache.
      block_table: int[batch, max_blocks], page ids.
      cache_seqlens: int[batch], keys in the table.
      cu_seqlens_q: int[batch + 1], row offsets.
      softmax_scale: multiplies q . k, not the bias.
      causal: hide keys after the query.
      window_size: (left, right) in keys, -1 for unlimited.
      rel_extent: distances that have a bias.
      rel_logits: float[num_tokens, num_heads, rel_extent], or ShearedLogits.
      kv_offset: int[batch], position of the first key of the table; 0 by default.
      total_seqlens: int[batch], length of the whole sequence; `kv_offset + cache_seqlens` by default.
      return_lse: also return the log-sum-exp.
      tokens: int[n], the packed rows to compute, in any order; all by default.
      max_seqlen_q: says how to compute, as do all that follow: taken so that a call can be repeated here as it is.
      plan: has no meaning here.
      num_splits: has no meaning here.
      out: has no meaning here.
      out_dtype: has no meaning here; the result is float64.
      backend: has no meaning here.
      config: has no meaning here.
      interpret: has no meaning here.

    Returns:
      float64[n, num_heads, head_dim], and with return_lse the natural-log float64[n, num_heads]: 0 and -inf in rows
      that see no key.

    Example:
      >>> from inkling_pallas.testing.cases import Case, build
      >>> call = build(Case(name="two", kind="example", q_lens=(3, 1), kv_lens=(3, 40)))
      >>> reference_rel_attention(**call).shape
      (4, 8, 128)
    """
    result, lse = evaluate(
        _attend,
        q,
        key_cache,
        value_cache,
        block_table=block_table,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        rel_extent=rel_extent,
        rel_logits=rel_logits,
        kv_offset=kv_offset,
        total_seqlens=total_seqlens,
        tokens=tokens,
    )
    return (result, lse) if return_lse else result


def evaluate(
    attend: Callable[..., tuple[np.ndarray, np.ndarray]],
    q: Any,
    key_cache: Any,
    value_cache: Any,
    *,
    block_table: Any,
    cache_seqlens: Any,
    cu_seqlens_q: Any,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    rel_extent: int,
    rel_logits: Any,
    kv_offset: Any = None,
    total_seqlens: Any = None,
    tokens: Any = None,
    **_how: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Walks the sequences and the page table and lets `attend` compute some rows of one sequence at a time.

    Returns:
      (out, lse) of the chosen tokens, float64: 0 and -inf in rows that see no key.
    """
    rows = np.arange(q.shape[0]) if tokens is None else np.asarray(tokens)
    offsets, cached = np.asarray(cu_seqlens_q, np.int64), np.asarray(cache_seqlens, np.int64)
    first_key = np.zeros_like(cached) if kv_offset is None else np.asarray(kv_offset, np.int64)
    total = first_key + cached if total_seqlens is None else np.asarray(total_seqlens, np.int64)
    result = np.zeros((len(rows), q.shape[1], q.shape[2]))
    lse = np.full((len(rows), q.shape[1]), -np.inf)
    key_cache, value_cache = _keys_and_values(key_cache, value_cache)
    q, sheared = np.asarray(q), isinstance(rel_logits, ShearedLogits)
    biases = np.asarray(rel_logits.table if sheared else rel_logits)
    table = np.asarray(block_table)
    left, right = (np.inf if side == -1 else side for side in window_size)
    reach = 0 if causal else right

    def step(b: int, some: np.ndarray) -> None:
        """Computes result[some] and lse[some], rows of sequence b."""
        position = total[b] - offsets[b + 1] + rows[some]
        low = 0 if np.isinf(left) else max(0, int(position.min() - left - first_key[b]))
        high = int(min(cached[b], position.max() + reach + 1 - first_key[b]))
        if low >= high:
            return
        dist = position[:, None] - (first_key[b] + np.arange(low, high))
        pages = table[b, np.arange(low, high) // key_cache.shape[1]]
        present = (pages >= 0) & (pages < len(key_cache))
        result[some], lse[some] = attend(
            q[rows[some]],
            _read_pages(key_cache, pages, present, low),
            _read_pages(value_cache, pages, present, low),
            softmax_scale,
            _sheared_bias(biases[rows[some]], position - first_key[b], np.arange(low, high), rel_extent)
            if sheared
            else _bias(biases[rows[some]], dist, rel_extent),
            (dist <= left) & (-dist <= reach) & present,
        )

    with concurrent.futures.ThreadPoolExecutor() as pool:  # NumPy computes outside the interpreter's lock
        for b in range(len(table)):
            mine = np.flatnonzero((rows >= offsets[b]) & (rows < offsets[b + 1]))
            steps = _steps(mine, q.shape[1] * max(1, int(cached[b])))
            collections.deque(pool.map(functools.partial(step, b), steps), maxlen=0)
    return result, lse


def _keys_and_values(key_cache: Any, value_cache: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns both as [num_blocks, block_size, num_kv_heads, head_dim]; key_cache is a PagedKVCache if that is all."""
    if value_cache is not None:
        return np.asarray(key_cache), np.asarray(value_cache)
    arrays = tuple(map(np.asarray, key_cache.arrays))
    if key_cache.layout == "packed":
        keys_then_values = arrays[0].transpose(0, 2, 1, 3)
        head_dim = keys_then_values.shape[-1] // 2
        return keys_then_values[..., :head_dim], keys_then_values[..., head_dim:]
    if key_cache.layout == "interleaved":
        return arrays[0][:, :, 0::2], arrays[0][:, :, 1::2]
    return arrays[0], arrays[1]


def _steps(indices: np.ndarray, scores_per_row: int) -> list[np.ndarray]:
    """Splits the indices so that no step holds more than _SCORES_PER_STEP scores (or one row)."""
    size = max(1, _SCORES_PER_STEP // scores_per_row)
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _read_pages(cache: np.ndarray, pages: np.ndarray, present: np.ndarray, low: int) -> np.ndarray:
    """Returns keys or values from `low` on, [keys, num_kv_heads, head_dim], whose pages are given; 0 if absent."""
    place = np.arange(low, low + len(pages)) % cache.shape[1]
    rows = cache[np.where(present, pages, 0), place]
    return np.where(present[:, None, None], rows, np.zeros_like(rows))


def _bias(rel_logits: np.ndarray, dist: np.ndarray, rel_extent: int) -> np.ndarray:
    """Returns the bias [rows, num_heads, keys] in the dtype of the table: exactly 0 outside 0 <= dist < rel_extent."""
    inside = (dist >= 0) & (dist < rel_extent)
    picked = np.take_along_axis(rel_logits, np.where(inside, dist, 0)[:, None, :], axis=2)
    return np.where(inside[:, None, :], picked, np.zeros_like(picked))


def _sheared_bias(table: np.ndarray, position: np.ndarray, keys: np.ndarray, rel_extent: int) -> np.ndarray:
    """Returns bias[rows, num_heads, keys]: row p of a sheared table starts at 8 * floor((p - rel_extent + 1) / 8)."""
    column = keys - 8 * ((position[:, None] - rel_extent + 1) // 8)
    inside = (column >= 0) & (column < table.shape[-1])
    picked = np.take_along_axis(table, np.where(inside, column, 0)[:, None, :], axis=2)
    return np.where(inside[:, None, :], picked, np.zeros_like(picked))


def _attend(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, bias: np.ndarray, visible: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns softmax attention of some rows of one sequence and its log-sum-exp, in float64."""
    q, keys, values, bias = (x.astype(np.float64) for x in (q, keys, values, bias))
    rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    grouped = q.reshape(rows, num_kv_heads, -1, head_dim).transpose(
        1, 2, 0, 3
    )  # [kv_head, head of the group, row, head_dim]
    logits = scale * (grouped @ keys.transpose(1, 2, 0)[:, None])
    logits += bias.reshape(rows, num_kv_heads, -1, len(keys)).transpose(1, 2, 0, 3)
    logits = np.where(visible, logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    out = weights @ values.transpose(1, 0, 2)[:, None] / np.where(total == 0, 1.0, total)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    lse = np.where(total == 0, -np.inf, lse)
    return out.transpose(2, 0, 1, 3).reshape(rows, num_heads, head_dim), lse[..., 0].transpose(2, 0, 1).reshape(
        rows, num_heads
    )
