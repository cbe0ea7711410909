"""Static facts of a call, the check of every input, and lengths made safe for addressing.

Shapes and Python arguments are checked at trace time and become a `Problem`, the static part of the jit key. Arrays
whose contents are known only on the device are made safe by `safe_lengths`; `host_checks.check_batch_contents` says on
the host what is wrong with them.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np

from inkling_pallas.core.cache_layouts import AXES, HEAD_AXIS, CacheDims, cache_dims
from inkling_pallas.core.describe import describe, dtype_name
from inkling_pallas.core.errors import (
    float_dtype,
    refuse,
    require_array,
    require_cache_floats,
    require_floats,
    static_bool,
    static_int,
)
from inkling_pallas.core.sheared_layout import ShearedLogits, sheared_width

# Lengths from outside are clipped to this before they are added or subtracted, so that no int32 can wrap around.
LENGTH_LIMIT = 2**29
# No distance, row or part gets here: a window, a bucket or num_splits as large is unlimited, and fits an int32.
_FARTHEST = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is static about a call. Hashable; equal problems share one compiled function."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch_size: int
    num_blocks: int
    block_size: int
    max_blocks: int  # block_table is [batch_size, max_blocks]
    max_seqlen_q: int  # a power of two
    softmax_scale: float
    causal: bool
    window_left: int | None  # None: unlimited
    window_right: int | None  # None: unlimited; 0 when causal
    rel_extent: int
    num_splits: int | None
    dtype: str
    out_dtype: str
    return_lse: bool
    layout: str = "separate"  # of the cache: one of cache_layouts.LAYOUTS
    sheared: bool = False  # rel_logits come as ShearedLogits

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def max_kv_len(self) -> int:
        """Keys that a row of the block table can hold."""
        return self.max_blocks * self.block_size

    @property
    def is_empty(self) -> bool:
        """True if the shapes leave no pair of a query and a key."""
        return 0 in (self.num_tokens, self.batch_size, self.num_blocks, self.max_kv_len)


class Lengths(NamedTuple):
    """The int32 arrays that describe a batch, as the caller gave them."""

    cache_seqlens: jax.Array
    cu_seqlens_q: jax.Array
    kv_offset: jax.Array | None
    total_seqlens: jax.Array | None


class Operands(NamedTuple):
    """The arrays that a backend reads, as the caller gave them."""

    q: jax.Array
    key_cache: jax.Array
    value_cache: jax.Array | None  # None: key_cache holds the values, too, as problem.layout says
    block_table: jax.Array
    rel_logits: jax.Array | ShearedLogits
    out: jax.Array | None

    @property
    def cache_arrays(self) -> tuple[jax.Array, ...]:
        """The array or the two arrays of the cache."""
        return (self.key_cache,) if self.value_cache is None else (self.key_cache, self.value_cache)


class Sequences(NamedTuple):
    """Per-sequence int32[batch_size] facts that are in bounds whatever the caller's arrays held.

    Row i of a sequence is packed row `q_start + i` and stands at position `first_pos + i`, counted in keys of the block
    table, so that `dist = first_pos + i - j` for key j: `kv_offset` and `total_seqlens` are absorbed here and nothing
    below knows them.
    """

    q_start: jax.Array
    q_len: jax.Array
    kv_len: jax.Array
    first_pos: jax.Array


def _static_scale(value: Any) -> float:
    rule, advice = "be a finite static float", "Inkling uses 1 / head_dim; there is no default."
    if isinstance(value, jax.core.Tracer):
        advice = "Pass a Python float; under jax.jit name the argument in static_argnames."
    elif isinstance(value, jax.Array | np.ndarray):
        advice = "Pass float(x): to read a jax.Array waits for its device."
    elif isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise refuse("softmax_scale", rule, describe(value), advice)


def _window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """Returns (left, right) with None for an unlimited side; a causal mask bounds the right side by 0."""
    rule, advice = (
        "be a pair (left, right) of static ints >= -1",
        "-1 leaves that side unlimited; (511, 0) keeps 512 keys.",
    )
    pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    if not pair or any(isinstance(x, bool) or not isinstance(x, int | np.integer) or x < -1 for x in window_size):
        raise refuse("window_size", rule, describe(window_size), advice)
    left, right = (None if x == -1 or x >= _FARTHEST else int(x) for x in window_size)
    return left, 0 if causal else right


def _require_floats(q: Any, key_cache: Any, value_cache: Any, layout: str) -> CacheDims:
    """Returns the dims of the cache after checking it and q."""
    dtype = require_floats("q", q, "Cast it with .astype().")
    require_array("q", q, ("num_tokens", "num_heads", "head_dim"), dtype, "Pack the rows of all sequences on axis 0.")
    of_cache = require_cache_floats("key_cache", key_cache)
    if of_cache != dtype:
        raise refuse("q", f"have the dtype of key_cache, {of_cache}", dtype, "Cast it: q.astype(key_cache.dtype).")
    head_dim = q.shape[2]
    shape = (*AXES[layout][:3], 2 * head_dim if layout == "packed" else head_dim)
    advice = "head_dim is that of q."
    if layout == "separate" and len(key_cache.shape) == 4 and key_cache.shape[3] == 2 * head_dim:
        advice = "Pass vLLM's packed array as PagedKVCache.packed(key_cache), with value_cache=None."
    elif layout == "separate" and len(key_cache.shape) == 5 and key_cache.shape[0] == 2:
        advice = "Pass key_cache[0] as key_cache and key_cache[1] as value_cache."
    require_array("key_cache", key_cache, shape, dtype, advice)
    if layout == "separate":
        advice = "It has the shape and dtype of key_cache."
        if value_cache is None:
            advice = "Pass one array of keys and values as PagedKVCache.packed(array) or .interleaved(array)."
        require_array("value_cache", value_cache, tuple(key_cache.shape), dtype, advice)
    dims = cache_dims(layout, key_cache.shape)
    _require_heads(q.shape[1], dims.num_kv_heads, f"Check axis 1 of q and axis {HEAD_AXIS[layout]} of key_cache.")
    return dims


def _require_heads(num_heads: int, num_kv_heads: int, advice: str) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads or num_heads < 1:
        raise refuse("num_heads", f"be a multiple of num_kv_heads = {num_kv_heads}", num_heads, advice)


def make_problem(
    operands: Operands,
    lengths: Lengths,
    *,
    layout: str,
    max_seqlen_q: Any,
    bucket: Callable[[int], int],
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    rel_extent: Any,
    num_splits: Any,
    out_dtype: Any,
    return_lse: Any,
) -> Problem:
    """Checks every shape, dtype and static argument and returns the Problem.

    Raises:
      ValueError: naming the argument, the rule, the value and what to do.
    """
    q, key_cache, value_cache, block_table, rel_logits, out = operands
    dims = _require_floats(q, key_cache, value_cache, layout)
    dtype = dtype_name(q)
    extent = static_int("rel_extent", rel_extent, 1)
    _require_bias(rel_logits, (q.shape[0], q.shape[1]), extent, dtype)
    require_array("block_table", block_table, ("batch", "max_blocks"), "int32", "It holds a page id per block of keys.")
    batch_size, keys = block_table.shape[0], block_table.shape[1] * dims.block_size
    if keys > LENGTH_LIMIT:
        rule = f"have rows of at most {LENGTH_LIMIT} keys, max_blocks * block_size"
        raise refuse("block_table", rule, keys, "Use fewer columns: max_blocks is for the longest sequence.")
    _require_lengths(lengths, batch_size)
    is_causal = static_bool("causal", causal)
    left, right = _window(window_size, is_causal)
    result_dtype = dtype if out_dtype is None else float_dtype("out_dtype", out_dtype, "None gives the dtype of q.")
    if out is not None:
        require_array("out", out, tuple(q.shape), result_dtype, "It is an array like the result.")
    return Problem(
        num_tokens=q.shape[0],
        num_heads=q.shape[1],
        batch_size=batch_size,
        **dims._asdict(),
        max_blocks=block_table.shape[1],
        max_seqlen_q=min(bucket(static_int("max_seqlen_q", max_seqlen_q, 1)), _FARTHEST),
        softmax_scale=_static_scale(softmax_scale),
        causal=is_causal,
        window_left=left,
        window_right=right,
        rel_extent=extent,
        num_splits=None if num_splits is None else min(static_int("num_splits", num_splits, 1), _FARTHEST),
        dtype=dtype,
        out_dtype=result_dtype,
        return_lse=static_bool("return_lse", return_lse),
        layout=layout,
        sheared=isinstance(rel_logits, ShearedLogits),
    )


def _require_bias(rel_logits: Any, rows: tuple[int, int], extent: int, dtype: str) -> None:
    """Raises ValueError for a bias that does not fit `rows`, (num_tokens, num_heads); None is left to the caller."""
    if not isinstance(rel_logits, ShearedLogits):
        if rel_logits is not None:
            advice = "It is [num_tokens, num_heads, rel_extent] in q's dtype."
            require_array("rel_logits", rel_logits, (*rows, extent), dtype, advice)
        return
    advice = "Shear it for these rows and this extent: see shear()."
    if rel_logits.rel_extent != extent:
        raise refuse("rel_logits", f"be sheared for rel_extent = {extent}", rel_logits.rel_extent, advice)
    require_array("rel_logits.table", rel_logits.table, (*rows, sheared_width(extent)), dtype, advice)
    require_array("rel_logits.shifts", rel_logits.shifts, rows[:1], "int32", advice)


def _require_lengths(lengths: Lengths, batch_size: int) -> None:
    require_array("cache_seqlens", lengths.cache_seqlens, (batch_size,), "int32", "One length per row of block_table.")
    require_array("cu_seqlens_q", lengths.cu_seqlens_q, (batch_size + 1,), "int32", "It is batch + 1 row offsets.")
    for name in ("kv_offset", "total_seqlens"):
        array = getattr(lengths, name)
        if array is not None:
            require_array(name, array, (batch_size,), "int32", "One value per row of block_table, or None.")
