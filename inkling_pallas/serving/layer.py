"""One layer of a server in small: a paged cache of random keys and values, and the operator over it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.attention import inkling_rel_attention
from inkling_pallas.cache_writes import write_kv
from inkling_pallas.core.batch import Batch, make_batch
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.relative_bias import log_scaling, relative_logits
from inkling_pallas.serving.trace import Request

_D_REL = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Shapes of one kind of layer on one device."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rel_extent: int
    window_size: tuple[int, int]
    block_size: int
    dtype: str
    layout: str

    def static_arguments(self) -> dict[str, Any]:
        """Returns the static arguments of the operator that belong to the layer."""
        names = ("rel_extent", "window_size")
        return {"softmax_scale": 1.0 / self.head_dim, "causal": True} | {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Lengths of one step: rows and keys per sequence; the keys include the rows."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    def next_decode(self) -> "Step":
        """Returns the step that adds one token to every sequence."""
        return Step(q_lens=(1,) * len(self.kv_lens), kv_lens=tuple(length + 1 for length in self.kv_lens))


def mixed_step(requests: Sequence[Request], chunk: int) -> Step:
    """Returns a batch of a whole prompt, the last chunk of a longer one, and a decode for each other request."""
    by_fit = sorted(range(len(requests)), key=lambda i: (requests[i].context > chunk, -requests[i].context))
    prompt = by_fit[0]
    longest = max((i for i in range(len(requests)) if i != prompt), key=lambda i: requests[i].context, default=prompt)
    q_lens = [1] * len(requests)
    for i in (prompt, longest):
        q_lens[i] = min(chunk, requests[i].context)
    kv_lens = [r.context if q > 1 else r.context + 1 for r, q in zip(requests, q_lens, strict=True)]
    return Step(q_lens=tuple(q_lens), kv_lens=tuple(kv_lens))


class LayerServer:
    """Pages, cache and compiled functions of one layer; sequences grow up to `capacity` keys."""

    def __init__(self, layer: Layer, capacity: Sequence[int], *, seed: int, backend: str) -> None:
        self.layer = layer
        self._rng = np.random.default_rng(seed)
        self._dtype = jnp.dtype(layer.dtype)
        blocks = [-(-length // layer.block_size) for length in capacity]
        pages = 1 + self._rng.permutation(sum(blocks))  # page 0 belongs to nobody
        self._tables = [part.tolist() for part in np.split(pages, np.cumsum(blocks)[:-1])]
        sizes = {"num_blocks": 1 + sum(blocks), "block_size": layer.block_size, "num_kv_heads": layer.num_kv_heads}
        self.cache = PagedKVCache.zeros(**sizes, head_dim=layer.head_dim, dtype=self._dtype, layout=layer.layout)
        self._projection = self._normal(_D_REL, layer.rel_extent) / jnp.asarray(_D_REL**0.5, self._dtype)
        self._write = jax.jit(write_kv, donate_argnums=0)
        self.static = layer.static_arguments() | {"backend": backend}
        operator = functools.partial(inkling_rel_attention, **self.static)
        self.attend = jax.jit(operator, static_argnames=("max_seqlen_q",))

    def _normal(self, *shape: int) -> jax.Array:
        return jnp.asarray(self._rng.standard_normal(shape, np.float32), self._dtype)

    def _batch(self, step: Step) -> Batch:
        return make_batch(step.q_lens, step.kv_lens, block_size=self.layer.block_size, block_tables=self._tables)

    def fill(self, lengths: Sequence[int]) -> None:
        """Writes random keys and values for the first tokens of each sequence."""
        if any(lengths):
            self._write_rows(self._batch(Step(q_lens=tuple(lengths), kv_lens=tuple(lengths))))

    def _write_rows(self, batch: Batch) -> None:
        shape = (batch.num_tokens, self.layer.num_kv_heads, self.layer.head_dim)
        self.cache = self._write(self.cache, self._normal(*shape), self._normal(*shape), jnp.asarray(batch.slots))

    def begin(self, step: Step) -> dict[str, Any]:
        """Writes the keys and values of a step's rows and returns the operator's arguments, with random queries."""
        batch, layer = self._batch(step), self.layer
        self._write_rows(batch)
        heads = (batch.num_tokens, layer.num_heads)
        is_global = layer.window_size[0] == -1
        positions = jnp.asarray(batch.positions)
        tau = log_scaling(positions) if is_global else jnp.ones(positions.shape, jnp.float32)
        q = self._normal(*heads, layer.head_dim).astype(jnp.float32) * tau[:, None, None]
        return batch.arguments() | {
            "q": q.astype(self._dtype),
            "key_cache": self.cache,
            "value_cache": None,
            "rel_logits": relative_logits(self._normal(*heads, _D_REL), self._projection, tau),
        }
