"""Other ways to compute a workload, to time beside ours: those that come with jax.

A peer whose name ends in `_nobias` leaves the bias out: it is a floor for a kernel that must also add one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inkling_pallas.cases import Case
from inkling_pallas.timing import Call

# A peer may take this share of the device's memory.
_MEMORY_SHARE = 0.5
_BYTES_PER_SCORE = 10  # float32 score, float32 bias, weight


class PeerSkippedError(Exception):
    """A peer cannot compute a workload; the message says why."""


def xla_dense(case: Case, sets: Sequence[dict[str, Any]]) -> Call:
    """Returns the formula in plain jnp, with whole arrays of scores and biases. Its result is the operator's."""
    batch, pages = sets[0]["block_table"].shape
    scores = batch * case.num_heads * max(case.all_q_lens) * pages * case.block_size
    _require_memory(_BYTES_PER_SCORE * scores, "scores, bias and weights of the padded batch")
    places = _padded_rows(case)
    static = ("softmax_scale", "causal", "window_size")
    compute = jax.jit(functools.partial(dense_attention, **{name: sets[0][name] for name in static}))
    arrays = ("q", "key_cache", "value_cache", "block_table", "cache_seqlens", "cu_seqlens_q", "rel_logits")
    return lambda number: compute({name: sets[number % len(sets)][name] for name in arrays}, *places)


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


def jax_cudnn_nobias(case: Case, sets: Sequence[dict[str, Any]], implementation: str = "cudnn") -> Call:
    """Returns cuDNN's flash attention without bias, over contiguous keys and values that were laid out before.

    Decode folds the heads of a group into rows, which is faster than one row a head; the result is then
    [batch, group, num_kv_heads, head_dim], that of prefill [batch, longest q_len, num_heads, head_dim].
    """
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise PeerSkippedError("cuDNN needs an NVIDIA GPU")
    decodes = set(case.q_lens) == {1}
    if not decodes and case.q_lens != case.kv_lens:
        raise PeerSkippedError(
            "cuDNN through jax puts the causal diagonal at the first key: q_len must be kv_len, or 1"
        )
    window = case.window_size[0]
    keys = [min(kv_len, window + 1) if decodes and window >= 0 else kv_len for kv_len in case.kv_lens]
    elements = len(keys) * max(keys) * case.num_kv_heads * case.head_dim
    if decodes and len(keys) * max(keys) > 2 * sum(keys):
        raise PeerSkippedError("it pads all sequences to one length, and most of this batch would be padding")
    _require_memory(4 * elements * len(sets), "contiguous keys and values")
    prepared = [_contiguous(case, arguments, keys, decodes) for arguments in sets]
    lengths = jnp.asarray(keys, jnp.int32) if len(set(keys)) > 1 else None
    attend: Callable[..., jax.Array] = functools.partial(
        jax.nn.dot_product_attention,  # pyright: ignore[reportCallIssue]
        scale=sets[0]["softmax_scale"],
        is_causal=not decodes,
        local_window_size=(window, 0) if window >= 0 and not decodes else None,
        query_seq_lengths=None if decodes else lengths,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )
    compute = jax.jit(lambda q, k, v: attend(q, k, v))
    return lambda number: compute(*prepared[number % len(prepared)])


def _contiguous(
    case: Case, arguments: dict[str, Any], keys: Sequence[int], decodes: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (q, k, v), padded to the longest sequence: the last `keys` keys of each, every one of its rows."""
    pages = np.asarray(arguments["block_table"])
    first = np.array(case.kv_lens) - np.array(keys)
    key = np.minimum(first[:, None] + np.arange(max(keys)), max(case.kv_lens) - 1)
    page = pages[np.arange(len(pages))[:, None], key // case.block_size]
    k, v = (arguments[name][page, key % case.block_size] for name in ("key_cache", "value_cache"))
    q = arguments["q"]
    if decodes:
        grouped = q.reshape(len(keys), case.num_kv_heads, -1, case.head_dim)
        return grouped.transpose(0, 2, 1, 3), k, v
    return q[_padded_rows(case)[0]], k, v


def _require_memory(num_bytes: int, what: str) -> None:
    """Raises PeerSkippedError where something takes too much of the device's memory."""
    limit = device_memory() * _MEMORY_SHARE
    if num_bytes > limit:
        raise PeerSkippedError(f"{what} would take {num_bytes / 1e9:.0f} GB; {limit / 1e9:.0f} GB are free for it")


def device_memory() -> int:
    """Returns the bytes that arrays may take on the default device; 8 GB where jax does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 8 * 10**9)


# Makes a workload's call from its sets of inputs, or raises PeerSkippedError.
Peer = Callable[[Case, Sequence[dict[str, Any]]], Call]
PEERS: Mapping[str, Peer] = MappingProxyType({"jax_cudnn_nobias": jax_cudnn_nobias, "xla_dense": xla_dense})
