"""The formula in plain jnp, with whole arrays of scores and biases: a peer that has the bias."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inkling_pallas.bench.clocks import Rotation
from inkling_pallas.bench.peers.base import PeerCall, require_memory
from inkling_pallas.testing.cases import Case

_BYTES_PER_SCORE = 10  # float32 score, float32 bias, weight


def xla_dense(case: Case, sets: Sequence[Mapping[str, Any]]) -> PeerCall:
    """Returns the formula in plain jnp over the paged cache. Its result is the operator's."""
    batch, pages = sets[0]["block_table"].shape
    scores = batch * case.num_heads * max(case.all_q_lens) * pages * case.block_size
    require_memory(_BYTES_PER_SCORE * scores, "scores, bias and weights of the padded batch")
    places = _padded_rows(case)
    static = ("softmax_scale", "causal", "window_size")
    compute = jax.jit(functools.partial(dense_attention, **{name: sets[0][name] for name in static}))
    arrays = ("q", "key_cache", "value_cache", "block_table", "cache_seqlens", "cu_seqlens_q", "rel_logits")
    return PeerCall(
        call=Rotation(compute, [({name: arguments[name] for name in arrays}, *places) for arguments in sets]),
        form="",
        rows=lambda result: result,
    )


def dense_attention(
    inputs: Mapping[str, jax.Array],
    rows: jax.Array,
    sequence: jax.Array,
    index: jax.Array,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> jax.Array:
    """Returns attention [num_tokens, num_heads, head_dim] of a batch that is padded to its longest q_len and kv_len.

    Args:
      inputs: the arrays of a call of `inkling_rel_attention`, by name.
      rows: int32[batch, q]; the packed row of row i of sequence b.
      sequence: int32[num_tokens]; the b of each packed row.
      index: int32[num_tokens]; the i of each packed row.
      softmax_scale: as in `inkling_rel_attention`.
      causal: as there.
      window_size: as there.
    """
    q, table = inputs["q"][rows], inputs["block_table"]
    k, v = (
        inputs[name][table].reshape(len(rows), -1, *inputs[name].shape[2:]) for name in ("key_cache", "value_cache")
    )
    grouped = q.reshape(*rows.shape, k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k, preferred_element_type=jnp.float32) * softmax_scale
    q_len = inputs["cu_seqlens_q"][1:] - inputs["cu_seqlens_q"][:-1]
    position = (inputs["cache_seqlens"] - q_len)[:, None] + lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    key = lax.iota(jnp.int32, k.shape[1])[None, None]
    dist = position[:, :, None] - key  # [b, q, k]
    scores += _bias(inputs["rel_logits"][rows], dist).reshape(scores.shape)
    left, right = window_size
    visible = (key < inputs["cache_seqlens"][:, None, None]) & ((dist <= left) | (left == -1))
    visible &= (dist >= 0) if causal else (dist >= -right) | (right == -1)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(q.shape)
    return out[sequence, index]


def _bias(rel_logits: jax.Array, dist: jax.Array) -> jax.Array:
    """Returns the bias f32[b, head, q, k] of rows with biases [b, q, head, extent] at distances [b, q, k]."""
    extent = rel_logits.shape[-1]
    bias = jnp.take_along_axis(rel_logits, jnp.clip(dist, 0, extent - 1)[:, :, None], axis=-1).astype(jnp.float32)
    return jnp.where(((dist >= 0) & (dist < extent))[:, :, None], bias, 0.0).transpose(0, 2, 1, 3)


def _padded_rows(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    starts = np.cumsum((0, *case.all_q_lens))
    inside = np.arange(max(case.all_q_lens))
    rows = np.minimum(starts[:-1, None] + inside, case.num_tokens - 1)
    sequence, index = np.nonzero(inside < np.array(case.all_q_lens)[:, None])
    as_int32 = functools.partial(jnp.asarray, dtype=jnp.int32)
    return as_int32(rows), as_int32(sequence), as_int32(index)
