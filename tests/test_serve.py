"""The serving loop: checked step by step over a trace; pages and schedule as properties; words and exit codes."""

import json
from typing import Any
from unittest import mock

import absent_card
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import inkling_pallas as ip
from inkling_pallas.__main__ import main
from inkling_pallas.core import console
from inkling_pallas.core.buckets import Variant
from inkling_pallas.serving import server as serving
from inkling_pallas.serving.options import build, parser
from inkling_pallas.serving.page_pool import PageOwnershipError, PagePool
from inkling_pallas.serving.scheduler import Limits, Scheduler
from inkling_pallas.serving.simulate import rows_to_check, serve
from inkling_pallas.serving.trace import Request
from inkling_pallas.serving.warmup import padding_batch

SHAPES = "--head-dim 16 --global-heads 2 --local-heads 4 --global-extent 32 --local-extent 16 --block-size 4"
EVERYTHING = "--check-every 1 --check-rows 0 --dtype float32"
SMALL = f"--shrink 32 --token-budget 32 --chunk 16 --max-seqs 8 {SHAPES} {EVERYTHING}".split()
# Both pools run out: requests are preempted for pages of either.
SCARCE = ["--global-pages", "70", "--local-pages", "24", "--local-layers", "2"]
TINY = f"--requests 1 --shrink 32 --token-budget 16 --chunk 16 --max-seqs 1 {SHAPES} {EVERYTHING}".split()


@pytest.mark.slow
def test_24_requests_step_by_step_with_preemption(tmp_path, capsys):
    assert main(["serve-sim", *SMALL, *SCARCE, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Green" in printed
    assert "pages is exhausted" in printed
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    result = written["result"]
    assert result["requests"] == 24
    assert result["checked_steps"] == result["steps"]
    assert result["checked_rows"] == 3 * result["rows"]  # a global and two local layers
    assert result["compiled_variants"] == result["compiled_in_warmup"]
    assert result["preemptions"] > 0
    assert result["rows"] > result["recomputed_rows"] > 0
    assert result["pages"]["global"]["peak"] <= 70
    assert result["pages"]["local"]["peak"] <= 24
    assert result["red"] == []
    assert written["meta"]["command"].startswith("python -m inkling_pallas serve-sim --shrink 32")


@pytest.fixture(scope="module")
def compiled():
    """A scheduler's options and a server that keeps its compiled steps from test to test."""
    options = parser().parse_args([*SMALL, *SCARCE, "--layout", "packed"])
    return options, build(options)[1]


def red_steps(compiled, *, prepare=None, window_left=15, argv=()):
    """Serves the trace on fresh NaN pools, with something broken, and returns what was red."""
    options, server = compiled
    fresh = {kind.name: serving._nan_cache(kind) for kind in server.kinds}
    scheduler = build(parser().parse_args([*SMALL, *SCARCE, *argv]))[0]
    scheduler.pools["local"].window_left = window_left
    own = server.prepare
    prepared = own if prepare is None else lambda rows, pools: prepare(own(rows, pools), rows)
    with mock.patch.object(server, "_caches", fresh), mock.patch.object(server, "prepare", prepared):
        tally = serve(scheduler, server, options, lambda done, label: None)
    assert len(scheduler.finished) == len({progress.number for progress in scheduler.finished})
    return tally.red


def rows_of_a_neighbour(step, rows):
    return step._replace(table_rows=np.roll(step.table_rows, 1, axis=1))


def tables_swapped(step, rows):
    for batch in step.batches.values():
        batch.block_table[: len(rows)] = batch.block_table[: len(rows)][::-1].copy()
    return step


class NotWrittenAgain:
    """After a preemption, keys that were in the cache once are taken for written."""

    def __init__(self):
        self.written = {}

    def __call__(self, step, rows):
        first = 0
        for some in rows:
            again = max(0, min(some.end, self.written.get(some.number, 0)) - some.begin)
            for batch in step.batches.values():
                batch.slots[first : first + again] = -1
            self.written[some.number] = max(some.end, self.written.get(some.number, 0))
            first += some.end - some.begin
        return step


@pytest.mark.slow
@pytest.mark.host
def test_the_loop_is_green_in_another_layout(compiled):
    assert red_steps(compiled) == []


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize(
    "broken",
    [
        {"window_left": 11},
        {"prepare": rows_of_a_neighbour},
        {"prepare": tables_swapped},
        {"prepare": NotWrittenAgain()},
    ],
    ids=["a page freed too early", "keys of a neighbour", "tables swapped", "not computed again"],
)
def test_what_breaks_on_the_host_is_seen(compiled, broken):
    assert red_steps(compiled, **broken)


def without_bias(*args, rel_logits, **rest):
    return ip.inkling_rel_attention(*args, rel_logits=jnp.zeros_like(rel_logits), **rest)


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize(
    ("place", "name", "broken"),
    [
        (serving, "inkling_rel_attention", without_bias),
        (ip.Batch, "in_layer", lambda self, layer, **sizes: self),
    ],
    ids=["bias dropped", "layers share pages"],
)
def test_what_breaks_in_the_step_is_seen(place, name, broken):
    argv = [*TINY, "--requests", "2", "--local-layers", "2"]
    options = parser().parse_args(argv)
    with mock.patch.object(place, name, broken):
        scheduler, server = build(options)
        assert serve(scheduler, server, options, lambda done, label: None).red


@pytest.mark.lowering
@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
def test_a_decode_step_compiles_for_a_card_and_writes_its_pools_in_place():
    argv = "--requests 4 --token-budget 64 --chunk 64 --max-seqs 8 --block-size 64 --backend hopper --local-layers 5"
    server = build(parser().parse_args(argv.split()))[1]
    batch = padding_batch(Variant(16, 8, 1, server.buckets.max_blocks[0]))
    rows = serving.synthetic.table_rows(np.zeros(16, np.int64), batch.positions)
    on_card = jax.sharding.SingleDeviceSharding(absent_card.device())
    inputs = (server._caches, server._tables, {kind.name: batch for kind in server.kinds}, rows)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_card), inputs)
    memory: Any = server._step.trace(*shapes).lower().compile().memory_analysis()
    pools = sum(pool.nbytes for pool in jax.tree.leaves(server._caches))
    assert memory.alias_size_in_bytes == pools
    assert memory.temp_size_in_bytes < pools / 4


@pytest.mark.host
def test_a_red_row_ends_with_1(capsys, monkeypatch):
    monkeypatch.setattr(serving, "error_limit", lambda *_: 1e-12)
    assert main(["serve-sim", *TINY]) == 1
    assert "RED: " in capsys.readouterr().out


@pytest.mark.host
def test_a_leak_ends_with_1(capsys, monkeypatch):
    monkeypatch.setattr(PagePool, "release", lambda self, sequence: None)
    assert main(["serve-sim", *TINY]) == 1
    assert "RED: pool 'global' has 3 pages in use after the last request: a leak." in capsys.readouterr().out


@pytest.mark.host
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--global-pages", "20"], "request 7 must need at most the 20 pages of pool 'global'; got 33 for 130"),
        (["--local-pages", "8"], "pages of pool 'local'; got 9 for 35 tokens. It could not run even alone."),
        (["--max-model-len", "50"], "request 3 must have at most max_model_len = 50 tokens"),
        (["--chunk", "33"], "chunk must be at most token_budget, 32; got 33."),
        (["--global-heads", "3", "--global-kv-heads", "2"], "num_heads must be a multiple of num_kv_heads = 2; got 3"),
        (["--trace", "/no/such/file"], "/no/such/file: No such file or directory."),
        (["--backend", "cuda"], "backend must be"),
    ],
)
def test_bad_input_is_one_line_and_2(argv, message, capsys):
    assert main(["serve-sim", *SMALL, *argv]) == 2
    printed = capsys.readouterr()
    assert message in printed.out
    assert "Traceback" not in printed.out + printed.err


@pytest.mark.host
def test_a_malformed_trace_is_explained(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("ContextTokens,GeneratedTokens\n5,2\n5,x\n")
    assert main(["serve-sim", *SMALL, "--trace", str(path)]) == 2
    assert "line 3: GeneratedTokens must be an integer from 0" in capsys.readouterr().out


@pytest.mark.host
@pytest.mark.parametrize(("option", "value"), [("--requests", "0"), ("--check-rows", "-1"), ("--shrink", "1.5")])
def test_malformed_options_end_with_2(option, value, capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve-sim", option, value])
    assert end.value.code == 2
    assert f"{option}: must be an integer >= 1; got '{value}'" in capsys.readouterr().err


REQUESTS = st.lists(
    st.builds(Request, context=st.integers(1, 40), generated=st.integers(0, 12)), min_size=1, max_size=8
)


@pytest.mark.host
@given(REQUESTS, st.data())
def test_every_request_is_served_whole_and_sees_its_own_keys(requests, data):
    """Replays the schedule on a memory of (request, position): what a row sees must be there when the step has run."""
    block_size, chunk, left = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 9))
    limits = Limits(
        token_budget=chunk + data.draw(st.integers(0, 9)),
        chunk=chunk,
        max_seqs=data.draw(st.integers(1, 5)),
        max_model_len=52,
    )
    pools = {}
    for name, window in (("global", None), ("local", left)):
        one = PagePool(num_pages=1, block_size=block_size, window_left=window)
        least = max(one.most_pages(r.context + r.generated, chunk) for r in requests)
        pages = data.draw(st.integers(least, 3 * least))
        pools[name] = PagePool(num_pages=pages, block_size=block_size, window_left=window)
    scheduler, memory, computed = Scheduler(requests, pools, limits), {}, dict.fromkeys(range(len(requests)), 0)
    while scheduler.unfinished:
        preempted = len(scheduler.preemptions)
        scheduled = scheduler.schedule()
        for preemption in scheduler.preemptions[preempted:]:
            computed[preemption.number] = 0
        assert 0 < sum(rows.end - rows.begin for rows in scheduled) <= limits.token_budget
        assert len({rows.number for rows in scheduled}) == len(scheduled) <= limits.max_seqs
        for rows in scheduled:
            assert rows.begin == computed[rows.number] < rows.end <= rows.begin + chunk
            computed[rows.number] = rows.end
            write(memory, pools, rows)
        for rows in scheduled:
            require_visible(memory, pools, rows)
        scheduler.complete(scheduled)
        for pool in pools.values():
            pool.check()
    assert sorted(progress.number for progress in scheduler.finished) == list(range(len(requests)))
    for progress in scheduler.finished:
        assert progress.generated == progress.request.generated
        assert progress.computed == progress.request.context + max(0, progress.generated - 1)
    assert [pool.in_use for pool in pools.values()] == [0, 0]


def write(memory, pools, rows):
    for name, pool in pools.items():
        for position in range(rows.begin, rows.end):
            page = pool.table(rows.number)[position // pool.block_size]
            assert 1 <= page <= pool.num_pages
            memory[name, page, position % pool.block_size] = (rows.number, position)


def require_visible(memory, pools, rows):
    for name, pool in pools.items():
        first = 0 if pool.window_left is None else max(0, rows.begin - pool.window_left)
        for position in range(first, rows.end):
            page = pool.table(rows.number)[position // pool.block_size]
            assert memory[name, page, position % pool.block_size] == (rows.number, position)


@pytest.mark.host
@given(st.integers(1, 12), st.integers(1, 4), st.none() | st.integers(0, 6), st.data())
def test_pages_are_owned_once_and_all_come_back(num_pages, block_size, left, data):
    pool, keys = PagePool(num_pages=num_pages, block_size=block_size, window_left=left), {}
    for _ in range(data.draw(st.integers(0, 30))):
        sequence, rows = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 8))
        if rows == 0:
            pool.release(sequence)
            keys.pop(sequence, None)
        else:
            free, table, have = pool.free_pages, pool.table(sequence), keys.get(sequence, 0)
            missing = pool.reserve(sequence, have, rows)
            kept = [page for page in pool.table(sequence) if page]
            if missing:
                assert set(kept) <= set(table)
                assert pool.free_pages >= free
            else:
                keys[sequence] = have + rows
                assert len(kept) <= pool.most_pages(have + rows, rows)
        pool.check()
        assert pool.in_use + pool.free_pages == num_pages
        assert pool.in_use <= pool.peak <= num_pages
    for sequence in keys:
        pool.release(sequence)
    assert pool.free_pages == num_pages


def given_twice(pool):
    pool._tables["b"] = pool.table("a")


def freed_while_owned(pool):
    pool._free.append(pool.table("a")[0])


def forgotten(pool):
    del pool._owner[pool.table("a")[0]]


def leaked(pool):
    pool._free.pop()


def free_twice(pool):
    pool._free.append(pool._free[0])


@pytest.mark.host
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (given_twice, "page 1 is owned twice: by 'a' and by 'b'"),
        (freed_while_owned, "page 1 is free and owned by 'a' at once"),
        (forgotten, "page 1 of 'a' is in its table or in the list of owners, not in both"),
        (leaked, "a page has leaked or is free twice: 2 owned and 2 free of 5"),
        (free_twice, "a page has leaked or is free twice: 2 owned and 4 free of 5"),
    ],
)
def test_a_broken_pool_is_named(broken, message):
    pool = PagePool(num_pages=5, block_size=4)
    assert pool.reserve("a", 0, 8) == 0
    pool.check()
    broken(pool)
    with pytest.raises(PageOwnershipError, match="^" + message):
        pool.check()


@pytest.mark.host
def test_a_page_is_given_back_by_its_owner_only():
    pool = PagePool(num_pages=5, block_size=4)
    pool.reserve("a", 0, 8)
    given_twice(pool)
    with pytest.raises(PageOwnershipError, match="page 2 is given back by 'b'; its owner is 'a'"):
        pool.release("b")


@pytest.mark.host
def test_a_pool_that_is_exhausted_takes_no_page():
    pool = PagePool(num_pages=3, block_size=4)
    assert pool.reserve("a", 0, 5) == 0
    assert pool.reserve("b", 0, 12) == 2
    assert pool.table("b") == []
    assert pool.free_pages == 1


@pytest.mark.host
def test_rows_to_check_are_ends_of_requests_first():
    rng = np.random.default_rng(0)
    assert sorted(rows_to_check([3, 1, 6], 5, rng)) == [0, 2, 3, 4, 9]
    assert sorted(rows_to_check([3, 1, 6], 0, rng)) == list(range(10))
    assert len(rows_to_check([3, 1, 6], 7, rng)) == 7


@pytest.mark.host
def test_a_meter_without_rich_prints_news_only(capsys, monkeypatch):
    monkeypatch.setattr(console, "_HAS_RICH", False)
    with console.meter("serving", 3) as show:
        for done in (0, 0, 2, 2):
            show(done, "step")
    assert capsys.readouterr().out == "serving 0/3: step\nserving 2/3: step\n"
