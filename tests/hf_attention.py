"""This package's operator as the attention of Hugging Face's Inkling, over paged caches that jax owns.

transformers hands over q, the new keys and values and a bias; `PagedAttention` is registered as an attention of theirs,
packs the live rows, writes them to its caches and attends. Tensors cross between torch and jax by dlpack: on one
device they are the same memory, and nothing goes through the host but a step's lengths and page tables.
"""
# The extra `hf` is not installed where types are checked.
# pyright: reportMissingImports=false

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import inkling_pallas as ip

NAME = "inkling_pallas"
_DTYPES = {torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16, torch.float16: jnp.float16}


class Taken(NamedTuple):
    """What one call of the operator took."""

    is_local: bool
    max_seqlen_q: int
    backend: str


class ConvCache(DynamicCache):
    """transformers' cache without keys and values, which are in pages; it keeps what the convolutions need."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen = 0

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Returns the new keys and values as they are."""
        del args, kwargs
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the tokens before this step, padding included."""
        del layer_idx
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns the number of keys and where they start."""
        del layer_idx
        return self.seen + query_length, 0


@functools.partial(jax.jit, static_argnames=("static", "backend"), donate_argnames="cache")
def _write_and_attend(
    cache: ip.PagedKVCache,
    q: Any,
    k: Any,
    v: Any,
    rel_logits: Any,
    batch: ip.Batch,
    plan: Any,
    static: Any,
    backend: str,
) -> tuple[ip.PagedKVCache, jax.Array]:
    cache = ip.write_kv(cache, k, v, batch.slots)
    call = batch.arguments() | dict(static)
    out = ip.inkling_rel_attention(q, cache, None, **call, rel_logits=rel_logits, plan=plan, backend=backend)
    assert isinstance(out, jax.Array)  # no LSE was asked for
    return cache, out


class PagedAttention:
    """An Inkling model of transformers whose attention is this package's; `step` runs it.

    Args:
      model: an InklingForCausalLM; its attention is replaced.
      prompts: token ids of each sequence, padded on the left to the longest as transformers does.
      max_new_tokens: that follow them at most.
      block_size: tokens of a page.
      layout: of the caches.
      backend: of the operator.
    """

    def __init__(
        self, model: Any, prompts: list[list[int]], *, max_new_tokens: int, block_size: int, layout: str, backend: str
    ) -> None:
        self._model, self._backend, self._block_size = model, backend, block_size
        self.padding = np.array([max(map(len, prompts)) - len(prompt) for prompt in prompts])
        self.taken: list[Taken] = []
        self._convs = ConvCache(model.config)
        longest = max(map(len, prompts)) + max_new_tokens
        pages = -(-longest // block_size)
        # Pages in a random order, so that a page table that is ignored shows.
        self._tables = np.random.default_rng(0).permutation(len(prompts) * pages).reshape(len(prompts), pages)
        sizes = {"num_blocks": self._tables.size, "block_size": block_size, "layout": layout}
        self._caches = []
        for layer in model.model.layers:
            heads = {"num_kv_heads": layer.self_attn.num_key_value_heads, "head_dim": layer.self_attn.head_dim}
            self._caches.append(ip.PagedKVCache.zeros(**sizes, **heads, dtype=_DTYPES[model.dtype]))
            layer.self_attn.rel_logits_proj.forward = functools.partial(_bias_by_distance, layer.self_attn)
        ALL_ATTENTION_FUNCTIONS.register(NAME, self._attend)
        model.config._attn_implementation = NAME

    def step(self, ids: Any, attention_mask: Any) -> Any:
        """Returns the logits of the next columns of the padded batch.

        Args:
          ids: int64[sequences, columns].
          attention_mask: int64[sequences, columns so far]; 0 for padding.
        """
        begin, end = self._convs.seen, self._convs.seen + ids.shape[1]
        q_lens = np.clip(end - np.maximum(self.padding, begin), 0, None)
        kv_lens = np.clip(end - self.padding, 0, None)
        batch = ip.make_batch(
            q_lens.tolist(), kv_lens.tolist(), block_size=self._block_size, block_tables=self._tables.tolist()
        )
        self._batch, self._plans = jax.device_put(batch), {}
        column = np.arange(begin, end)
        self._live = torch.from_numpy(np.flatnonzero(column >= self.padding[:, None])).to(ids.device)
        result = self._model(input_ids=ids, attention_mask=attention_mask, past_key_values=self._convs, use_cache=True)
        self._convs.seen = end
        return result.logits

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, position_bias: Any, **more: Any
    ) -> tuple[Any, None]:
        """What transformers calls: [sequences, heads, columns, ...] in, [sequences, columns, heads, head_dim] out."""
        del attention_mask, more
        q, k, v, rel_logits = (self._to_jax(x) for x in (query, key, value, position_bias))
        static = {
            "softmax_scale": module.scaling,
            "causal": True,
            "window_size": (module.sliding_window - 1, 0) if module.is_sliding else (-1, -1),
            "rel_extent": module.rel_extent,
        }
        cache = self._caches[module.layer_idx]
        plan = self._plan(module.is_sliding, q, cache, static)
        with jax.transfer_guard("disallow"):
            self._caches[module.layer_idx], out = _write_and_attend(
                cache, q, k, v, rel_logits, self._batch, plan, tuple(static.items()), self._backend
            )
        sequences, heads, columns, head_dim = query.shape
        result = query.new_zeros(sequences * columns, heads, head_dim)
        result[self._live] = torch.from_dlpack(out)[: len(self._live)]
        return result.view(sequences, columns, heads, head_dim), None

    def _plan(self, is_local: bool, q: jax.Array, cache: ip.PagedKVCache, static: dict[str, Any]) -> ip.BatchPlan:
        """Returns the plan that the layers of a kind share in a step; notes which backend it is for."""
        if is_local not in self._plans:
            call = self._batch.arguments() | static | {"backend": self._backend}
            self._plans[is_local] = ip.plan_batch(q, cache, None, **call)
            shape = jax.ShapeDtypeStruct((*q.shape[:2], static["rel_extent"]), q.dtype)
            backend = ip.explain(q, cache, None, **call, rel_logits=shape).backend
            self.taken.append(Taken(is_local, self._batch.max_seqlen_q, backend))
        return self._plans[is_local]

    def _to_jax(self, x: Any) -> jax.Array:
        """Returns the live rows [num_tokens, heads, ...] of [sequences, heads, columns, ...], in the same memory."""
        rows = x.transpose(1, 2).flatten(0, 1)[self._live]
        missing = self._batch.num_tokens - len(rows)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, missing)).contiguous()
        return jax.dlpack.from_dlpack(rows, copy=False if rows.is_cuda else None)


def _bias_by_distance(attention: Any, relative_states: Any, query_positions: Any, key_positions: Any) -> Any:
    """Returns [sequences, heads, columns, rel_extent] where transformers makes a bias per key of it."""
    del query_positions, key_positions
    return (relative_states @ attention.rel_logits_proj.proj).transpose(1, 2)
