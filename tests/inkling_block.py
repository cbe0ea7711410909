"""A step of Inkling's text decoder in JAX, every piece around the attention operator written out.

Read it from `decoder_step` down. A step takes packed rows of any mix of sequences (prompts, chunks of prompts, decodes)
and the state of a server: a paged cache per layer, and the last inputs of the four short convolutions of a layer. The
maths is that of transformers' `InklingForCausalLM` in float32; `test_inkling_block.py` compares the two. What a stack
would do otherwise is said where it stands: group the rows of an expert, keep bfloat16, scan over layers of a kind.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import inkling_pallas as ip

Weights = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The static facts of a layer's attention; a model has two kinds."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rel_extent: int
    is_local: bool  # sees rel_extent keys; a global layer sees all, and has log scaling

    def attention(self) -> dict[str, Any]:
        """Returns the static arguments of the operator. Inkling scales by 1 / head_dim, for q and k are normed."""
        window = (self.rel_extent - 1, 0) if self.is_local else (-1, -1)
        return {
            "softmax_scale": 1 / self.head_dim,
            "causal": True,
            "window_size": window,
            "rel_extent": self.rel_extent,
        }


@dataclass(frozen=True, kw_only=True)
class Model:
    """The static facts of a model."""

    kinds: tuple[Kind, ...]  # one per layer
    conv_width: int = 4
    log_scaling_floor: int = 128_000
    log_scaling_alpha: float = 0.1
    experts_per_token: int = 6
    route_scale: float = 8.0
    logits_divisor: float = 24.0
    eps: float = 1e-6


class ConvRows(NamedTuple):
    """Where a short convolution reads, in all sequences' history [batch * (width - 1)] followed by the step's rows."""

    taps: jax.Array  # int32[num_tokens, width]: the rows that a token sees, oldest first
    kept: jax.Array  # int32[batch, width - 1]: the rows that are each sequence's history after the step


class Step(NamedTuple):
    """What all layers of a step share."""

    batch: ip.Batch
    plans: dict[Kind, ip.BatchPlan]
    conv_rows: ConvRows
    tau: jax.Array  # float32[num_tokens]


class LayerState(NamedTuple):
    """What a layer remembers: keys and values, and the last inputs of its convolutions by name."""

    cache: ip.PagedKVCache
    history: dict[str, jax.Array]  # float32[batch, width - 1, channels]


class Seen(NamedTuple):
    """What a layer's attention took and gave; for comparison only."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rel_logits: jax.Array
    out: jax.Array


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def decoder_step(
    model: Model, weights: Weights, state: list[LayerState], tokens: jax.Array, batch: ip.Batch
) -> tuple[jax.Array, list[LayerState], list[Seen]]:
    """Runs a step.

    Args:
      model: static.
      weights: from `inkling_weights.take_weights`.
      state: from `empty_state`, donated: the caches are written in place.
      tokens: int32[num_tokens], packed as the batch says.
      batch: from `inkling_pallas.make_batch`.

    Returns:
      (float32 logits [num_tokens, vocab], state, what each layer's attention saw). The next token of a sequence is the
      largest logit of its last row.
    """
    tau = ip.log_scaling(batch.positions, model.log_scaling_floor, model.log_scaling_alpha)
    plans = {kind: _plan(kind, state[i].cache, batch) for i, kind in enumerate(model.kinds)}
    step = Step(batch, plans, conv_rows(batch, model.conv_width), tau)
    x = rms_norm(weights["embed"][tokens], weights["embed_norm"], model.eps)
    state, seen = list(state), []
    for i, kind in enumerate(model.kinds):
        x, state[i], saw = decoder_layer(model, kind, weights["layers"][i], state[i], x, step)
        seen.append(saw)
    x = rms_norm(x, weights["norm"], model.eps) / model.logits_divisor
    return x @ weights["unembed"].T, state, seen


def decoder_layer(
    model: Model, kind: Kind, w: Weights, state: LayerState, x: jax.Array, step: Step
) -> tuple[jax.Array, LayerState, Seen]:
    """Attention and experts, each with a norm before it and a short convolution after it."""
    history = dict(state.history)

    def short_conv(name: str, rows: jax.Array) -> jax.Array:
        rows, history[name] = convolve(rows, state.history[name], w[name], step.conv_rows)
        return rows

    seen, cache = attention(model, kind, w, state.cache, short_conv, rms_norm(x, w["attn_norm"], model.eps), step)
    x = x + short_conv("attn_sconv", seen.out.reshape(len(x), -1) @ w["o"].T)
    hidden = rms_norm(x, w["mlp_norm"], model.eps)
    hidden = experts(model, w, hidden) if "router" in w else dense(w, hidden)
    return x + short_conv("mlp_sconv", hidden), LayerState(cache, history), seen


def attention(
    model: Model, kind: Kind, w: Weights, cache: ip.PagedKVCache, short_conv: Any, x: jax.Array, step: Step
) -> tuple[Seen, ip.PagedKVCache]:
    """q, k, v and the relative query from x; k and v through their convolutions into the cache; the operator."""
    q, k, v, r = (x @ w[name].T for name in "qkvr")
    k, v = short_conv("k_sconv", k), short_conv("v_sconv", v)
    q = rms_norm(q.reshape(len(x), kind.num_heads, kind.head_dim), w["q_norm"], model.eps)
    k = rms_norm(k.reshape(len(x), kind.num_kv_heads, kind.head_dim), w["k_norm"], model.eps)
    v = v.reshape(k.shape)
    r = r.reshape(len(x), kind.num_heads, -1)
    if kind.is_local:
        rel_logits = ip.relative_logits(r, w["rel_proj"])
    else:  # log scaling multiplies the scores, so both q and the bias; the operator never sees it
        q, rel_logits = q * step.tau[:, None, None], ip.relative_logits(r, w["rel_proj"], step.tau)
    cache = ip.write_kv(cache, k, v, jnp.asarray(step.batch.slots))
    out = ip.inkling_rel_attention(
        q, cache, None, **step.batch.arguments(), **kind.attention(), rel_logits=rel_logits, plan=step.plans[kind]
    )
    assert isinstance(out, jax.Array)  # no LSE was asked for
    return Seen(q, k, v, rel_logits, out), cache


def experts(model: Model, w: Weights, x: jax.Array) -> jax.Array:
    """A mixture of routed experts, of which each token takes a few, and shared ones, which all take.

    The router scores both kinds. Choice is by the sigmoid and a correction, weight by the softmax of log-sigmoids over
    the chosen and the shared. Here every expert computes every row, weighted by 0 where it was not chosen.
    """
    scores = x @ w["router"].T
    num_routed = len(w["router_correction"])
    routed, shared = jnp.split(scores, [num_routed], axis=1)
    _, chosen = jax.lax.top_k(jax.nn.sigmoid(routed) + w["router_correction"][None], model.experts_per_token)
    taking_part = jnp.concatenate([jnp.take_along_axis(routed, chosen, axis=1), shared], axis=1)
    share = jax.nn.softmax(jax.nn.log_sigmoid(taking_part), axis=1) * model.route_scale * w["router_scale"][None]
    chosen_share, shared_share = jnp.split(share, [model.experts_per_token], axis=1)
    routed_share = jnp.einsum("tk,tke->te", chosen_share, jax.nn.one_hot(chosen, num_routed))
    share = jnp.concatenate([routed_share, shared_share], axis=1)
    hidden = jax.nn.silu(jnp.einsum("th,eih->tei", x, w["gates"])) * jnp.einsum("th,eih->tei", x, w["ups"])
    return jnp.einsum("te,tei,ehi->th", share, hidden, w["downs"])


def dense(w: Weights, x: jax.Array) -> jax.Array:
    """The multilayer perceptron of the first layers."""
    return (jax.nn.silu(x @ w["gate"].T) * (x @ w["up"].T)) @ w["down"].T * w["mlp_scale"][None]


def convolve(x: jax.Array, history: jax.Array, weight: jax.Array, rows: ConvRows) -> tuple[jax.Array, jax.Array]:
    """Returns x plus its causal, depthwise convolution within each sequence, and the history after it.

    Args:
      x: [num_tokens, channels].
      history: [batch, width - 1, channels], the inputs before this step's; zeros at a sequence's start.
      weight: [channels, width]; the last column meets the token itself.
      rows: from `conv_rows`.
    """
    inputs = jnp.concatenate([history.reshape(-1, x.shape[1]), x])
    return x + jnp.einsum("twc,cw->tc", inputs[rows.taps], weight), inputs[rows.kept]


def conv_rows(batch: ip.Batch, width: int) -> ConvRows:
    """Returns where the convolutions of a step read, the same for all of them."""
    past = width - 1
    starts, ends = batch.cu_seqlens_q[:-1], batch.cu_seqlens_q[1:]
    sequences = jnp.arange(len(starts))

    def row_of(sequence: jax.Array, index: jax.Array) -> jax.Array:
        """The row at `index` of a sequence's rows of this step; a negative one lies in its history."""
        return jnp.where(index < 0, (sequence + 1) * past + index, len(starts) * past + starts[sequence] + index)

    token = jnp.arange(batch.num_tokens)
    sequence = jnp.minimum(jnp.searchsorted(ends, token, side="right"), len(starts) - 1)  # padding: any will do
    taps = row_of(sequence[:, None], (token - starts[sequence])[:, None] + jnp.arange(-past, 1)[None])
    return ConvRows(taps, row_of(sequences[:, None], (ends - starts)[:, None] + jnp.arange(-past, 0)[None]))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns x over the root mean square of its last axis, times the weight."""
    scaled = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + eps)
    return scaled * jnp.expand_dims(weight, tuple(range(x.ndim - 1)))


def _plan(kind: Kind, cache: ip.PagedKVCache, batch: ip.Batch) -> ip.BatchPlan:
    q = jax.ShapeDtypeStruct((batch.num_tokens, kind.num_heads, kind.head_dim), cache.dtype)
    return ip.plan_batch(q, cache, None, **batch.arguments(), **kind.attention())


def empty_state(model: Model, weights: Weights, *, batch_size: int, num_blocks: int, block_size: int) -> list[Any]:
    """Returns the state of a server before its first step.

    Args:
      model: static.
      weights: from `inkling_weights.take_weights`; the channels of the convolutions are theirs.
      batch_size: sequences of a step, padding included; sequence b is always row b of a batch.
      num_blocks: pages of each layer's cache.
      block_size: tokens of a page.
    """
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "dtype": jnp.float32}
    state = []
    for kind, w in zip(model.kinds, weights["layers"], strict=True):
        cache = ip.PagedKVCache.zeros(**sizes, num_kv_heads=kind.num_kv_heads, head_dim=kind.head_dim)
        convs = {name: weight for name, weight in w.items() if name.endswith("sconv")}
        shapes = {name: (batch_size, model.conv_width - 1, len(weight)) for name, weight in convs.items()}
        state.append(LayerState(cache, {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}))
    return state
