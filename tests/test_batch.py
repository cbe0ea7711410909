"""make_batch, Buckets and warmup: what a scheduler knows becomes a call, and a server compiles no more than it said."""

import csv
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import inkling_pallas as ip
from inkling_pallas.serving.warmup import padding_batch
from inkling_pallas.testing import assert_rows_close

LADDERS = ip.Buckets(num_tokens=(4, 8, 20), batch_size=(2, 5), max_seqlen_q=(1, 4, 16), max_blocks=(4, 32))
STATIC: dict[str, Any] = {"softmax_scale": 1 / 16, "causal": True, "window_size": (-1, -1), "rel_extent": 8}


@st.composite
def drawn_batches(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the arguments of make_batch: few sequences that fit LADDERS, on pages in any order."""
    block_size = draw(st.sampled_from([1, 3, 4]))
    lengths = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 25)), max_size=5))
    q_lens, kv_lens = [q for q, _ in lengths], [q + before for q, before in lengths]
    pages = iter(draw(st.permutations(range(1, 200))))
    tables = [[next(pages) for _ in range(-(-kv // block_size))] for kv in kv_lens]
    buckets = draw(st.sampled_from([LADDERS, None]))
    return {
        "q_lens": q_lens,
        "kv_lens": kv_lens,
        "block_size": block_size,
        "block_tables": tables,
        "buckets": buckets,
    }


def check_metadata(batch: ip.Batch, drawn: dict[str, Any]) -> None:
    """Asserts that a batch says of each row and sequence what it was made from, and nothing of the padding."""
    q_lens, kv_lens, size, tables = (drawn[k] for k in ("q_lens", "kv_lens", "block_size", "block_tables"))
    row = 0
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        assert batch.cu_seqlens_q[b] == row
        assert batch.cache_seqlens[b] == kv_len
        assert batch.block_table[b].tolist() == tables[b] + [0] * (batch.variant.max_blocks - len(tables[b]))
        for position in range(kv_len - q_len, kv_len):
            page, offset = divmod(position, size)
            assert batch.slots[row] == tables[b][page] * size + offset
            assert batch.positions[row] == position
            row += 1
    assert (batch.cu_seqlens_q[len(q_lens) :] == row).all()
    assert not batch.cache_seqlens[len(q_lens) :].any()
    assert not batch.block_table[len(q_lens) :].any()
    assert (batch.slots[row:] == -1).all()
    assert not batch.positions[row:].any()
    assert max([1, *q_lens]) <= batch.max_seqlen_q


@given(drawn_batches())
def test_a_batch_says_what_it_was_made_from(drawn):
    batch = ip.make_batch(**drawn)
    check_metadata(batch, drawn)
    arrays = jax.tree.leaves(batch)
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
    if drawn["buckets"] is not None:
        assert all(size in getattr(LADDERS, name) for name, size in batch.variant._asdict().items())
    pages = jax.ShapeDtypeStruct((200, drawn["block_size"], 1, 16), jnp.bfloat16)
    cache = ip.PagedKVCache.separate(pages, pages)
    rows = jax.ShapeDtypeStruct((batch.num_tokens, 2, 16), jnp.bfloat16)
    logits = jax.ShapeDtypeStruct((batch.num_tokens, 2, 8), jnp.bfloat16)
    ip.check_batch(rows, cache, None, **batch.arguments(), **STATIC, rel_logits=logits)


@pytest.mark.optimized
def test_layers_share_a_pool_in_place():
    """Each layer writes and reads pages of its own; the carry of the scan is the donated pool itself."""
    layers, shape = 3, {"num_blocks": 1000, "block_size": 16}
    pool = ip.PagedKVCache.zeros(num_blocks=layers * 1000, block_size=16, num_kv_heads=1, head_dim=16, layout="packed")
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((layers, 4, 4, 16)), jnp.bfloat16)
    batch = ip.make_batch([3], [20], block_size=16, block_tables=[[-1, 7]])
    static = STATIC | {"window_size": (3, 0)}

    def layer_step(cache: ip.PagedKVCache, rows: jax.Array, batch: ip.Batch) -> tuple[ip.PagedKVCache, Any]:
        cache = ip.write_kv(cache, rows[:, :1], rows[:, 1:2], batch.slots)
        call: dict[str, Any] = batch.arguments() | {"rel_logits": rows[:, 2:, :8]} | static
        return cache, ip.inkling_rel_attention(rows[:, 2:], cache, None, **call)

    def step(pool: ip.PagedKVCache, rows: jax.Array, batch: ip.Batch) -> tuple[ip.PagedKVCache, Any]:
        def body(pool: ip.PagedKVCache, layer: Any) -> tuple[ip.PagedKVCache, Any]:
            index, rows = layer
            return layer_step(pool, rows, batch.in_layer(index, **shape))

        return jax.lax.scan(body, pool, (jnp.arange(layers, dtype=jnp.int32), rows))

    compiled: Any = jax.jit(step, donate_argnums=0).lower(pool, rows, batch).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.arrays[0].nbytes
    assert memory.temp_size_in_bytes < pool.arrays[0].nbytes // layers
    written, out = compiled(jax.tree.map(jnp.copy, pool), rows, batch)
    for index in range(layers):
        own = jax.tree.map(lambda x, i=index: x[i * 1000 : (i + 1) * 1000], (pool, written))
        cache, alone = layer_step(own[0], rows[index], batch)
        np.testing.assert_array_equal(np.asarray(own[1].arrays[0]), np.asarray(cache.arrays[0]))
        assert_rows_close(out[index], np.asarray(alone))


BROKEN_BATCHES: dict[str, Callable[[ip.Batch], dict[str, Any]]] = {
    "padding is written": lambda batch: {"slots": np.maximum(batch.slots, 0)},
    "slots off by one": lambda batch: {"slots": batch.slots + (batch.slots >= 0)},
    "positions from 0": lambda batch: {"positions": np.zeros_like(batch.positions)},
    "padding has rows": lambda batch: {"cu_seqlens_q": batch.cu_seqlens_q + (batch.cu_seqlens_q == 3)},
    "keys without the new rows": lambda batch: {"cache_seqlens": batch.cache_seqlens - 1},
    "wrong pages": lambda batch: {"block_table": batch.block_table + 1},
}


@pytest.mark.parametrize("fault", BROKEN_BATCHES)
def test_a_broken_batch_is_caught(fault):
    drawn = {"q_lens": [2, 1], "kv_lens": [2, 9], "block_size": 4, "block_tables": [[7], [5, 3, 8]]}
    batch = ip.make_batch(**drawn, buckets=LADDERS)
    check_metadata(batch, drawn)
    with pytest.raises(AssertionError):
        check_metadata(dataclasses.replace(batch, **BROKEN_BATCHES[fault](batch)), drawn)


def test_pages_of_its_own_begin_after_page_0():
    batch = ip.make_batch([1, 2], [5, 2], block_size=4)
    assert batch.block_table.tolist() == [[1, 2], [3, 0]]
    assert batch.pad_rows([10, 11, 12]).tolist() == [10, 11, 12, 0]
    assert batch.pad_rows(np.ones((3, 2), np.float32)).shape == (4, 2)


def test_pages_left_behind_may_be_anything_and_are_never_written():
    batch = ip.make_batch([1], [9], block_size=4, block_tables=[[-7, 2**40, 3]])
    assert batch.slots.tolist() == [12]
    assert batch.block_table[0, :3].tolist() == [-1, 2**31 - 1, 3]


def test_an_empty_batch_is_all_padding():
    batch = ip.make_batch([], [], block_size=4, buckets=LADDERS)
    assert batch.variant == ip.Variant(4, 2, 1, 4)
    assert padding_batch(batch.variant).variant == batch.variant
    assert jax.tree.structure(padding_batch(batch.variant)) == jax.tree.structure(batch)


ERRORS = [
    (
        lambda: ip.make_batch([1, 2], [3], block_size=4),
        "kv_lens must have one entry per entry of q_lens, 2; got 1. Both are per sequence.",
    ),
    (
        lambda: ip.make_batch([1, -2], [3, 3], block_size=4),
        "q_lens[1] must be a static int in [0, 536870912]; got -2. Pass a Python int in that range.",
    ),
    (
        lambda: ip.make_batch([1, 5], [1, 3], block_size=4),
        "kv_lens[1] must be at least q_lens[1] = 5; got 3. It counts the keys after this step: those before it, and "
        "the new rows.",
    ),
    (
        lambda: ip.make_batch([1, 2], [5, 5], block_size=4, block_tables=[[9, 1], [2, 1]]),
        "block_tables[1][1] must be another page than block_tables[0][1], for both write slot 4; got 1. Sequences may "
        "share pages that they only read.",
    ),
    (
        lambda: ip.make_batch([1], [9], block_size=4, block_tables=[[1, 2]]),
        "block_tables[0] must have at least 3 pages, as kv_lens[0] needs; got 2. Allocate the pages of a step's rows "
        "before it.",
    ),
    (
        lambda: ip.make_batch([1], [9], block_size=4, block_tables=[]),
        "block_tables must have one entry per entry of q_lens, 1; got 0. Each is the list of a sequence's page ids.",
    ),
    (
        lambda: ip.make_batch([2, 2], [9, 5], block_size=4, block_tables=[[1, 2, 3], [4, -1]]),
        "block_tables[1][1] must be a page id in [0, 536870911), for a row of this step is written there; got -1. "
        "Only pages that no row writes or sees may be anything.",
    ),
    (
        lambda: ip.make_batch([1], [4], block_size=4, block_tables=[[2**29]]),
        "block_tables[0][0] must be a page id in [0, 536870911), for a row of this step is written there; got "
        "536870912. Only pages that no row writes or sees may be anything.",
    ),
    (
        lambda: ip.make_batch([9, 12], [9, 12], block_size=4, buckets=LADDERS),
        "num_tokens of a batch must be at most 20, the last bucket; got 21. Schedule less in a step.",
    ),
    (
        lambda: ip.make_batch([1], [1], block_size=4).pad_rows([1, 2]),
        "rows must have at most num_tokens = 1 entries on axis 0; got 2. It is one entry per row of the batch.",
    ),
    (
        lambda: dataclasses.replace(LADDERS, batch_size=(8, 4)),
        "batch_size must be a rising tuple of ints >= 1; got (8, 4). A batch takes the first that holds it.",
    ),
    (
        lambda: dataclasses.replace(LADDERS, max_seqlen_q=(1, 3)),
        "max_seqlen_q must hold powers of two; got (1, 3). A call rounds it up to one.",
    ),
    (
        lambda: ip.Buckets.for_server(max_num_batched_tokens=0, max_num_seqs=1, max_model_len=1, block_size=1),
        "max_num_batched_tokens must be a static int >= 1; got 0. Pass a Python int in that range.",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message[:40] for _, message in ERRORS])
def test_what_is_wrong_with_a_batch_is_said(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert str(caught.value) == message


def test_the_variants_are_those_that_some_batch_needs():
    """Every batch of up to 5 sequences of 1 to 16 rows is tried, as far as it fits."""
    ladders = dataclasses.replace(LADDERS, max_blocks=(4,))
    needed = set()
    for batch, longest in itertools.product(range(1, 6), range(1, 17)):
        for tokens in range(longest + batch - 1, min(20, longest * batch) + 1):
            needed.add(ladders.fit(ip.Variant(tokens, batch, longest, 1)))
    assert set(ladders.variants()) == needed
    assert len(ladders.variants()) == len(needed) < 3 * 2 * 3
    assert len(LADDERS.variants()) == 2 * len(needed)


def test_the_ladders_of_a_server_hold_its_limits():
    limits = {"max_num_batched_tokens": 5000, "max_num_seqs": 100, "max_model_len": 1000, "block_size": 48}
    buckets = ip.Buckets.for_server(**limits)
    assert buckets.num_tokens[-1] == 5000
    assert buckets.batch_size == (8, 32, 100)
    assert buckets.max_seqlen_q == (1, 16, 8192)
    assert buckets.max_blocks == (21,)
    documented = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "max_model_len": 32768, "block_size": 64}
    assert len(ip.Buckets.for_server(**documented).variants()) == 59
    tiny = ip.Buckets.for_server(max_num_batched_tokens=1, max_num_seqs=1, max_model_len=1, block_size=16)
    assert tiny.variants() == (ip.Variant(1, 1, 1, 1),)


class TinyServer:
    """A jitted step of one small layer over a donated cache: what a stack does, without the model."""

    def __init__(self, pool: int, block_size: int = 64) -> None:
        self.cache = ip.PagedKVCache.zeros(
            num_blocks=pool, block_size=block_size, num_kv_heads=1, head_dim=16, layout="packed"
        )
        self.traces = 0
        self.jitted = jax.jit(self._step, donate_argnums=0)

    def _step(self, cache: ip.PagedKVCache, batch: ip.Batch, rows: jax.Array) -> tuple[ip.PagedKVCache, Any]:
        self.traces += 1
        cache = ip.write_kv(cache, rows[:, :1], rows[:, 1:2], batch.slots)
        logits = jnp.broadcast_to(rows[:, 2:, :8], (rows.shape[0], 2, 8))
        return cache, ip.inkling_rel_attention(
            rows[:, 2:], cache, None, **batch.arguments(), **STATIC, rel_logits=logits
        )

    def run(self, batch: ip.Batch, rows: np.ndarray | None = None) -> jax.Array:
        """Runs a step; rows [live tokens, 4, 16] are k, v and two heads of q."""
        rows = np.ones((0, 4, 16), np.float32) if rows is None else rows
        self.cache, out = self.jitted(self.cache, batch, jnp.asarray(batch.pad_rows(rows), jnp.bfloat16))
        return out


SERVER_BUCKETS = ip.Buckets.for_server(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=4096, block_size=64)


def test_served_steps_give_what_one_whole_prefill_gives():
    """Chunks, decodes and padding, on scattered pages, against the oracle over the tokens in their order."""
    rng = np.random.default_rng(0)
    tokens = [rng.standard_normal((length, 4, 16)).astype(np.float32) for length in (90, 37)]
    pages = [[5, 2], [7]]
    served = [np.zeros((len(rows), 2, 16), np.float32) for rows in tokens]
    server, done = TinyServer(9), [0, 0]
    for q_lens in ([40, 20], [24, 1], [25, 16], [1]):
        kv_lens = [done[b] + q_len for b, q_len in enumerate(q_lens)]
        tables = pages[: len(q_lens)]
        batch = ip.make_batch(q_lens, kv_lens, block_size=64, block_tables=tables, buckets=SERVER_BUCKETS)
        chunks = [rows[begin:end] for rows, begin, end in zip(tokens, done, kv_lens, strict=False)]
        out = np.asarray(server.run(batch, np.concatenate(chunks)), np.float32)
        assert not out[sum(q_lens) :].any()
        for b, part in enumerate(np.split(out[: sum(q_lens)], np.cumsum(q_lens)[:-1])):
            served[b][done[b] : kv_lens[b]] = part
        done[: len(q_lens)] = kv_lens
    assert done == [90, 37]
    for rows, out in zip(tokens, served, strict=True):
        rounded = np.asarray(jnp.asarray(rows, jnp.bfloat16), np.float32)
        expected = ip.reference_rel_attention(
            rounded[:, 2:],
            rounded[:, None, :1],
            rounded[:, None, 1:2],
            block_table=np.arange(len(rows))[None],
            cache_seqlens=np.array([len(rows)]),
            cu_seqlens_q=np.array([0, len(rows)]),
            rel_logits=np.ascontiguousarray(rounded[:, 2:, :8]),
            **STATIC,
        )
        assert_rows_close(jnp.asarray(out, jnp.bfloat16), expected, limit=8e-3)


@dataclasses.dataclass
class Running:
    """A request on its way through the server."""

    context: int
    generated: int
    keys: int = 0

    def rows(self, budget: int) -> int:
        """Returns how many rows it takes in the next step."""
        return min(max(self.context - self.keys, 1), budget)


def trace_path() -> Path:
    """Returns the trace to serve: the shipped one, or what INKLING_TRACE names."""
    return Path(os.environ.get("INKLING_TRACE") or str(resources.files(ip) / "serving" / "data" / "requests.csv"))


def arrivals(path: Path) -> list[tuple[float, Running]]:
    """Returns (seconds, request) of a trace's first hour."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"]).timestamp() for row in rows]
    lengths = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    requests = [(time - times[0], Running(*length)) for time, length in zip(times, lengths, strict=True)]
    return [(time, request) for time, request in requests if time < 3600]


def served_steps(
    path: Path, *, tokens: int, sequences: int, seconds: float
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yields (ids of the sequences, q_lens, kv_lens) of each step: decodes first, then chunks of prompts."""
    waiting, running, now = arrivals(path)[::-1], {}, 0.0
    while waiting or running:
        now += seconds
        if not running:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now and len(running) < sequences:
            free = next(i for i in range(sequences) if i not in running)
            running[free] = waiting.pop()[1]
        budget, ids, q_lens = tokens, [], []
        for i in sorted(running, key=lambda i: running[i].keys < running[i].context):
            if budget:
                ids.append(i)
                q_lens.append(running[i].rows(budget))
                budget -= q_lens[-1]
        for i, q_len in zip(ids, q_lens, strict=True):
            running[i].keys += q_len
        yield ids, q_lens, [running[i].keys for i in ids]
        running = {i: r for i, r in running.items() if r.keys < r.context + r.generated}


@pytest.mark.slow
@pytest.mark.optimized
def test_warmup_compiles_all_that_a_trace_needs():
    """The real step, after warmup, is never traced again; 5,000 steps at most, as a long trace overruns this server."""
    path = trace_path()
    longest = max(request.context + request.generated for _, request in arrivals(path))
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": longest, "block_size": 64}
    buckets = ip.Buckets.for_server(**limits)
    pages = -(-longest // 64)
    server, reported = TinyServer(1 + 8 * pages), []
    seconds = ip.warmup(server.run, buckets, progress=lambda *report: reported.append(report))
    count = len(buckets.variants())
    assert set(seconds) == set(buckets.variants())
    assert [done for done, _, _ in reported] == list(range(1, count + 1))
    assert server.traces == count
    steps = 0
    for ids, q_lens, kv_lens in itertools.islice(served_steps(path, tokens=64, sequences=8, seconds=0.5), 5000):
        tables = [range(1 + i * pages, 1 + (i + 1) * pages) for i in ids]
        batch = ip.make_batch(q_lens, kv_lens, block_size=64, block_tables=tables, buckets=buckets)
        server.run(batch, np.ones((sum(q_lens), 4, 16), np.float32))
        steps += 1
    assert server.traces == count
    print(f"{path.name}: {steps:,} steps, {count} variants compiled, none since")


def serve_shapes(path: Path, buckets: ip.Buckets | None, max_traces: int) -> set[ip.Variant]:
    """Calls a jitted function on each batch of a trace, as a large server makes them; returns the variants seen."""

    @jax.jit
    @chex.assert_max_traces(n=max_traces)
    def step(batch: ip.Batch) -> jax.Array:
        return batch.slots[0]

    seen = set()
    for _, q_lens, kv_lens in served_steps(path, tokens=8192, sequences=256, seconds=0.05):
        batch = ip.make_batch(q_lens, kv_lens, block_size=64, buckets=buckets)
        step(batch)
        seen.add(batch.variant)
    return seen


def test_an_hour_of_a_trace_needs_no_more_variants_than_are_counted():
    limits = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "max_model_len": 32768, "block_size": 64}
    buckets = ip.Buckets.for_server(**limits)
    seen = serve_shapes(trace_path(), buckets, len(buckets.variants()))
    assert seen <= set(buckets.variants())
    print(f"{trace_path().name}: {len(seen)} of {len(buckets.variants())} variants")


def test_a_server_that_does_not_fix_its_table_traces_more():
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 32768, "block_size": 64}
    count = len(ip.Buckets.for_server(**limits).variants())
    with pytest.raises(AssertionError, match="traced"):
        serve_shapes(trace_path(), None, count)


def test_a_page_of_no_layer_reaches_no_other_layer():
    batch = ip.make_batch([1, 1], [1, 1], block_size=16, block_tables=[[41], [3]])
    own = batch.in_layer(1, num_blocks=40, block_size=16)
    assert own.block_table.tolist() == [[-1], [43]]
    assert own.slots.tolist() == [-1, 43 * 16]
