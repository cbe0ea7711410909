"""Partial results over parts of the keys, merged: parts in one memory, or one on each device of an axis."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.core.describe import is_like_array
from inkling_pallas.core.errors import refuse, require_plain

_GATHERED_BYTES = 2**20  # of a part


def merge_partials(
    outs: jax.Array | Sequence[jax.Array], lses: jax.Array | Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns attention over all keys from attention over disjoint parts of them.

    `lse = logsumexp_p lse_p` and `out = sum_p exp(lse_p - lse) out_p`; rows that see no key in any part give 0 and
    -inf.

    Args:
      outs: parts of float[num_tokens, num_heads, head_dim], as a sequence or stacked on axis 0.
      lses: their natural-log float32[num_tokens, num_heads].

    Returns:
      (out in the dtype of the parts, float32 lse). The merge is computed in float32: with float32 parts (`out_dtype`)
      it adds at most 1e-5 of relative error.

    Raises:
      ValueError: if there are no parts, or one without an axis of parts, or their shapes do not fit.

    Example:
      >>> parts, lses = jnp.stack([jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2))]), jnp.array([[[0.0]], [[0.0]]])
      >>> out, lse = merge_partials(parts, lses)
      >>> out.tolist(), round(float(lse[0, 0]), 4)
      ([[[0.5, 0.5]]], 0.6931)
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise refuse(
            "lses",
            "be as many as outs, at least one",
            f"{len(lses)} for {len(outs)} outs",
            "Pass one of each per part.",
        )
    for name, given in (("outs", outs), ("lses", lses)):
        for part in [given] if is_like_array(given) else given:
            require_plain(name, part)
    parts, logs = (x if isinstance(x, jax.Array) else jnp.stack(list(x)) for x in (outs, lses))
    if parts.ndim != 4:
        advice = "Pass parts in a list, or stacked on a new axis 0."
        raise refuse("outs", "have shape (parts, num_tokens, num_heads, head_dim)", parts.shape, advice)
    if parts.shape[:-1] != logs.shape:
        raise refuse("lses", f"have shape {parts.shape[1:-1]} each", logs.shape[1:], "They come from return_lse=True.")
    out, lse = _merge(
        parts.astype(jnp.float32),
        logs.astype(jnp.float32),
        largest=lambda x: x.max(axis=0, keepdims=True),
        total=lambda pair: jax.tree.map(lambda x: x.sum(axis=0, keepdims=True), pair),
    )
    return out[0].astype(parts.dtype), lse[0]


def merge_over_axis(out: jax.Array, lse: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Returns attention over all keys from each device's part of them, inside `jax.shard_map`.

    Few rows, as of a decode, are gathered on all devices by one collective, which takes the time of its latency; of
    many rows only sums are exchanged.

    Args:
      out: float32[num_tokens, num_heads, head_dim] of this device's keys.
      lse: natural-log float32[num_tokens, num_heads].
      axis: mesh axis of the parts.

    Returns:
      (out, lse), the same on each device; 0 and -inf in rows that see no key in any part.
    """
    if out.size * out.dtype.itemsize <= _GATHERED_BYTES:
        parts = lax.all_gather(jnp.concatenate([out, lse[..., None]], axis=-1), axis)
        return merge_partials(parts[..., :-1], parts[..., -1])
    return _merge(out, lse, largest=lambda x: lax.pmax(x, axis), total=lambda pair: lax.psum(pair, axis))


def _merge(
    outs: jax.Array, lses: jax.Array, *, largest: Callable[[Any], Any], total: Callable[[Any], Any]
) -> tuple[jax.Array, jax.Array]:
    """Returns parts merged, wherever they lie: `largest` reduces an array over them, `total` a pair of arrays."""
    top = largest(lses)
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lses - finite_top)
    # A part with weight 0 saw no key; what it holds must not matter, and 0 * NaN is NaN.
    seen = jnp.where((weights > 0)[..., None], outs, 0.0)
    weight, out = total((weights, weights[..., None] * seen))
    divisor = jnp.where(weight == 0, 1.0, weight)
    return out / divisor[..., None], jnp.where(weight == 0, -jnp.inf, finite_top + jnp.log(divisor))
