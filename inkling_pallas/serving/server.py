"""A server of attention layers alone: pools of both kinds, one jitted step over all layers, and its oracle."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.attention import inkling_rel_attention, plan_batch
from inkling_pallas.cache_writes import write_kv
from inkling_pallas.core.batch import Batch, make_batch
from inkling_pallas.core.buckets import Buckets
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.serving import synthetic
from inkling_pallas.serving.layer import Layer
from inkling_pallas.serving.page_pool import PagePool
from inkling_pallas.serving.scheduler import Rows
from inkling_pallas.testing.limits import baseline_rel_attention, error_limit, row_errors
from inkling_pallas.testing.reference import reference_rel_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Layers of one kind, which share a pool of num_pages pages each, besides page 0."""

    layer: Layer
    layers: int
    num_pages: int

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.layer.name

    @property
    def num_blocks(self) -> int:
        """Pages of a layer, page 0 included."""
        return self.num_pages + 1

    @property
    def window_left(self) -> int | None:
        """Keys that a row sees before its own; None for all."""
        left = self.layer.window_size[0]
        return None if left < 0 else left

    def page_pool(self) -> PagePool:
        """Returns the pages on the host."""
        return PagePool(num_pages=self.num_pages, block_size=self.layer.block_size, window_left=self.window_left)


class StepInput(NamedTuple):
    """A step's rows: a batch for each kind, and which entry of the tables each row is."""

    batches: dict[str, Batch]
    table_rows: np.ndarray
    numbers: np.ndarray


class Verdict(NamedTuple):
    """How one layer of a checked step did: its worst row error and the limit."""

    kind: str
    layer: int
    row_error: float
    limit: float

    @property
    def red(self) -> bool:
        """True if the row is over the limit."""
        return not self.row_error <= self.limit


class AttentionServer:
    """Pools on the device and the step that writes and attends in every layer.

    Attributes:
      traces: how often the step was traced, which is how many variants were compiled.
    """

    def __init__(self, kinds: Sequence[Kind], buckets: Buckets, *, seed: int, backend: str) -> None:
        self.kinds = tuple(kinds)
        self.buckets = buckets
        self.backend = backend
        self.traces = 0
        # NaN: a key that was never written must not be read.
        self._caches = {kind.name: _nan_cache(kind) for kind in kinds}
        self._tables = {kind.name: _tables(kind, seed + i) for i, kind in enumerate(kinds)}
        self._on_device = jax.device_put(self._tables)
        self._step = jax.jit(self._run, donate_argnums=0)
        self._queries = jax.jit(synthetic.queries, static_argnames="dtype")

    def prepare(self, scheduled: Sequence[Rows], pools: Mapping[str, PagePool]) -> StepInput:
        """Returns the arrays of a step, padded to a bucket."""
        q_lens, kv_lens = [rows.end - rows.begin for rows in scheduled], [rows.end for rows in scheduled]
        batches = {}
        for kind in self.kinds:
            tables = [pools[kind.name].table(rows.number) for rows in scheduled]
            size = kind.layer.block_size
            batches[kind.name] = make_batch(q_lens, kv_lens, block_size=size, block_tables=tables, buckets=self.buckets)
        first = batches[self.kinds[0].name]
        numbers = first.pad_rows(np.repeat([rows.number for rows in scheduled], q_lens))
        return StepInput(batches, synthetic.table_rows(numbers, first.positions), numbers)

    def run(self, step: StepInput) -> dict[str, jax.Array]:
        """Returns the outputs of every kind [layers, num_tokens, num_heads, head_dim], once they are there."""
        self._caches, outs = self._step(self._caches, self._on_device, step.batches, step.table_rows)
        return jax.block_until_ready(outs)

    def run_padding(self, batch: Batch) -> dict[str, jax.Array]:
        """Runs the step on a batch without a sequence, for `warmup`."""
        numbers = np.zeros(batch.num_tokens, np.int64)
        rows = synthetic.table_rows(numbers, batch.positions)
        return self.run(StepInput({kind.name: batch for kind in self.kinds}, rows, numbers))

    def _run(self, caches: Any, tables: Any, batches: dict[str, Batch], table_rows: jax.Array) -> tuple[Any, Any]:
        self.traces += 1
        done = {kind.name: self._layers(kind, caches, tables, batches[kind.name], table_rows) for kind in self.kinds}
        return {name: cache for name, (cache, _) in done.items()}, {name: outs for name, (_, outs) in done.items()}

    def _layers(self, kind: Kind, caches: Any, tables: Any, batch: Batch, table_rows: jax.Array) -> tuple[Any, Any]:
        """Returns the cache and the outputs of all layers of a kind."""
        layer, dtype = kind.layer, jnp.dtype(kind.layer.dtype)
        static: dict[str, Any] = layer.static_arguments() | {"backend": self.backend}
        tau = synthetic.temperatures(batch.positions, is_global=kind.window_left is None)
        q = jax.ShapeDtypeStruct((batch.num_tokens, layer.num_heads, layer.head_dim), dtype)
        plan = plan_batch(q, caches[kind.name], None, **batch.arguments(), **static)

        def body(cache: PagedKVCache, index_and_tables: Any) -> tuple[PagedKVCache, Any]:
            index, own_tables = index_and_tables
            own = batch.in_layer(index, num_blocks=kind.num_blocks, block_size=layer.block_size)
            cache = write_kv(cache, *synthetic.keys_and_values(own_tables, table_rows, dtype), own.slots)
            q, rel_logits = synthetic.queries(own_tables, table_rows, tau, dtype)
            return cache, inkling_rel_attention(
                q, cache, None, **own.arguments(), **static, rel_logits=rel_logits, plan=plan
            )

        indices = jnp.arange(kind.layers, dtype=jnp.int32)
        return jax.lax.scan(body, caches[kind.name], (indices, tables[kind.name]))

    def judge(self, step: StepInput, outs: Mapping[str, jax.Array], rows: np.ndarray) -> list[Verdict]:
        """Compares some rows of a step in every layer with the float64 oracle.

        The oracle's keys are made from (request, position) and read no page of a pool: a key that was written to a
        wrong page, overwritten, freed too early or not computed again after a preemption shows.

        Args:
          step: from `prepare`.
          outs: what `run` returned for it.
          rows: int[n], packed rows.
        """
        return [self._judge(kind, i, step, outs, rows) for kind in self.kinds for i in range(kind.layers)]

    def _judge(self, kind: Kind, index: int, step: StepInput, outs: Any, rows: np.ndarray) -> Verdict:
        layer, dtype = kind.layer, jnp.dtype(kind.layer.dtype)
        positions, numbers = step.batches[kind.name].positions[rows], step.numbers[rows]
        tau = synthetic.temperatures(jnp.asarray(positions), is_global=kind.window_left is None)
        padded = np.resize(np.arange(len(rows)), 1 << max(0, len(rows) - 1).bit_length())  # few shapes to compile
        own = self._on_device[kind.name].layer(index)
        q, rel_logits = self._queries(own, step.table_rows[:, rows][:, padded], tau[padded], dtype=dtype)
        call = _call_of_rows(self._tables[kind.name].layer(index), numbers, positions, dtype)
        call |= {"q": np.asarray(q)[: len(rows)], "rel_logits": np.asarray(rel_logits)[: len(rows)]}
        call |= layer.static_arguments()
        expected = reference_rel_attention(**call)
        limit = error_limit(row_errors(baseline_rel_attention(**call), expected), layer.dtype)
        got = np.asarray(outs[kind.name][index])[rows]
        return Verdict(kind.name, index, float(row_errors(got, expected).max()), limit)


def _nan_cache(kind: Kind) -> PagedKVCache:
    layer = kind.layer
    names = ("block_size", "num_kv_heads", "head_dim", "dtype", "layout")
    sizes = {name: getattr(layer, name) for name in names}
    cache = PagedKVCache.zeros(num_blocks=kind.layers * kind.num_blocks, **sizes)
    return jax.tree.map(functools.partial(jnp.full_like, fill_value=jnp.nan), cache)


def _tables(kind: Kind, seed: int) -> synthetic.Tables:
    names = ("num_heads", "num_kv_heads", "head_dim", "rel_extent")
    return synthetic.make_tables(seed, layers=kind.layers, **{name: getattr(kind.layer, name) for name in names})


def _call_of_rows(tables: synthetic.Tables, numbers: np.ndarray, positions: np.ndarray, dtype: Any) -> dict[str, Any]:
    """Returns the oracle's arguments but q, bias and statics: each row a sequence, each request one page."""
    requests, page = np.unique(numbers, return_inverse=True)
    longest = int(positions.max()) + 1
    request, position = (x.ravel() for x in np.meshgrid(requests, np.arange(longest), indexing="ij"))
    k, v = synthetic.keys_and_values(tables, synthetic.table_rows(request, position), dtype)
    shape = (len(requests), longest, *k.shape[1:])
    return {
        "key_cache": k.reshape(shape),
        "value_cache": v.reshape(shape),
        "block_table": page[:, None],
        "cache_seqlens": positions + 1,
        "cu_seqlens_q": np.arange(len(numbers) + 1),
    }
