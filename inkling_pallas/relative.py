"""What feeds the operator and what merges its parts: relative logits, log scaling, partial results."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.errors import refuse

_GATHERED_BYTES = 2**20  # of a part


def relative_logits(r: jax.Array, proj: jax.Array, tau: jax.Array | None = None) -> jax.Array:
    """Returns the table of bias values per token, head and distance: `tau[t] * sum_d r[t, h, d] * proj[d, e]`.

    Args:
      r: float[num_tokens, num_heads, d_rel], the relative query (d_rel is 16 in Inkling).
      proj: float[d_rel, rel_extent], shared by the heads of a layer, in the dtype of r.
      tau: float32[num_tokens] from `log_scaling`, or None. The caller multiplies q by it, too.

    Returns:
      [num_tokens, num_heads, rel_extent] in the dtype of r; summed and scaled in float32 before it is rounded.

    Raises:
      ValueError: if shapes or dtypes do not fit.

    Example:
      >>> relative_logits(jnp.ones((5, 8, 16)), jnp.ones((16, 1024))).shape
      (5, 8, 1024)
    """
    if r.ndim != 3 or proj.ndim != 2 or proj.shape[0] != r.shape[2]:
        raise refuse(
            "proj",
            "have shape (d_rel, rel_extent) with d_rel = r.shape[2]",
            f"{proj.shape} with r {r.shape}",
            "Transpose it?",
        )
    if proj.dtype != r.dtype:
        raise refuse("proj", f"have the dtype of r, {r.dtype}", proj.dtype, "Cast one of them with .astype().")
    table = jnp.einsum("thd,de->the", r, proj, preferred_element_type=jnp.float32, precision=_exact(r))
    if tau is not None:
        if tau.shape != r.shape[:1] or tau.dtype != jnp.float32:
            raise refuse(
                "tau",
                f"be float32 of shape {r.shape[:1]}",
                f"{tau.dtype} of shape {tau.shape}",
                "Take it from log_scaling().",
            )
        table = table * tau[:, None, None]
    return table.astype(r.dtype)


def _exact(array: jax.Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if array.dtype == jnp.float32 else None


def log_scaling(positions: jax.Array, n_floor: int = 128_000, alpha: float = 0.1) -> jax.Array:
    """Returns Inkling's temperature of its global layers, `1 + alpha * log(max((position + 1) / n_floor, 1))`.

    Args:
      positions: int[num_tokens], absolute positions of the query tokens.
      n_floor: positions below it have temperature 1.
      alpha: strength.

    Returns:
      float32[num_tokens]; multiply q by it and pass it to `relative_logits`. The operator itself never sees it.

    Example:
      >>> [round(float(x), 5) for x in log_scaling(jnp.array([127_999, 999_999]))]
      [1.0, 1.20557]
    """
    reach = (positions.astype(jnp.float32) + 1.0) / jnp.float32(n_floor)
    return 1.0 + jnp.float32(alpha) * jnp.log(jnp.maximum(reach, 1.0))


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
      ValueError: if there are no parts or their shapes do not fit.

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
    parts, logs = (x if isinstance(x, jax.Array) else jnp.stack(list(x)) for x in (outs, lses))
    if parts.shape[:-1] != logs.shape:
        raise refuse("lses", f"have shape {parts.shape[1:-1]} each", logs.shape[1:], "They come from return_lse=True.")
    out, lse = _merge(
        parts.astype(jnp.float32),
        logs,
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
