import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_benchmark import FIXED, TINY

from inkling_pallas.attention import inkling_rel_attention
from inkling_pallas.bench import (
    busy,
    ceilings,
    clocks,
    command,
    options,
    peers,
    results,
    run_case,
    sampled_judge,
    targets,
    workloads,
)
from inkling_pallas.bench.ceilings import Ceilings, Read
from inkling_pallas.bench.clocks import Rotation, Span, Timing
from inkling_pallas.bench.peers import base, contiguous, jax_libraries
from inkling_pallas.testing import row_errors
from inkling_pallas.testing.reference import reference_rel_attention

pytestmark = pytest.mark.host

# The fit to the cold reads and the matrix rate that the floors of the published peers were computed with.
PUBLISHED_FLOORS = {
    "dec_g_b1_8k": 9.3,
    "dec_g_b1_256k": 240.1,
    "dec_g_b32_64k": 1922,
    "dec_l16_b1_8k": 2.9,
    "dec_l8_b128_8k": 63.1,
    "dec_tp8l_b32_8k": 5.7,
    "dec_l16_b32_8k_p16": 31.9,
    "mtp4_l16_b32_8k": 34.1,
    "pre_g_8k": 1410,
    "pre_l16_32k": 776.6,
    "var8_g": 697.9,
    "chunk_l16_2k_on_30000": 50.4,
    "mix_g_31dec8k_1x2k": 627.4,
    "mix_l16_31dec8k_1x2k": 79.5,
}
REAL = "cpu_dec_tp8_b2_512"  # as `bench --suite cpu` has it


class CountingClock(clocks.WallClock):
    """Says that every call takes as long as its place in the rounds, and notes the rounds."""

    name = "counting"

    def measure(self, calls, rounds):
        self.rounds = list(rounds)
        return {name: [float(i) for i, (other, _) in enumerate(rounds) if other == name] for name in calls}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs `bench` with small cases but one, and ceilings that take no time; returns its status and its results."""
    monkeypatch.setattr(command, "measure_ceilings", lambda clock: FIXED)
    monkeypatch.setattr(clocks, "MAX_CALLS", 10)
    for name in ("SECONDS", "SETTLE_SECONDS", "_LOOP_SECONDS"):
        monkeypatch.setattr(busy, name, 0.01)
    small = {name: dataclasses.replace(TINY, name=name) for name in workloads.SUITES["cpu"] if name != REAL}
    monkeypatch.setattr(command, "WORKLOADS", {**workloads.WORKLOADS, **small})

    def run(*arguments):
        status = command.main(["--suite", "cpu", "--out", str(tmp_path), *arguments])
        path = tmp_path / ("cpu-cpu-partial.json" if "--cases" in arguments else "cpu-cpu.json")
        return status, json.loads(path.read_text())

    return run


def attention(arguments: dict[str, Any]) -> jax.Array:
    result = inkling_rel_attention(**arguments)
    assert isinstance(result, jax.Array)
    return result


def without_the_bias(arguments: dict[str, Any]) -> dict[str, Any]:
    return dict(arguments, rel_logits=jnp.zeros_like(arguments["rel_logits"]))


def brute_force_cost(case):
    keys, pairs, biases = set(), 0, 0
    left, right = (math.inf if side == -1 else side for side in case.window_size)
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        for i in range(q_len):
            for j in range(kv_len):
                dist = kv_len - q_len + i - j
                if dist <= left and -dist <= (0 if case.causal else right):
                    keys.add((b, j))
                    pairs += 1
                    biases += 0 <= dist < case.rel_extent
    rows = sum(case.q_lens) * case.num_heads
    elements = 2 * len(keys) * case.num_kv_heads * case.head_dim + biases * case.num_heads + 2 * rows * case.head_dim
    return 2 * elements, 4 * case.head_dim * case.num_heads * pairs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_size": (-1, -1)},
        {"window_size": (5, 0), "rel_extent": 6},
        {"q_lens": (9, 0, 5), "kv_lens": (9, 12, 3)},
        {"causal": False, "window_size": (6, 3)},
        {"causal": False, "window_size": (-1, 2)},
        {"causal": False, "window_size": (-1, -1), "q_lens": (3, 2), "kv_lens": (30, 0)},
    ],
)
def test_bytes_and_flops_are_those_of_counting_pairs(changes):
    case = dataclasses.replace(TINY, **changes)
    cost = workloads.cost(case)
    assert (cost.num_bytes, cost.flops) == brute_force_cost(case)


@pytest.mark.parametrize("name", PUBLISHED_FLOORS)
def test_named_workloads_have_the_published_floors(name):
    cost = workloads.cost(workloads.WORKLOADS[name])
    read_us = max(cost.num_bytes / 4472e3, 2.0 + cost.num_bytes / 4596e3)
    assert max(read_us, cost.flops / 780e6) == pytest.approx(PUBLISHED_FLOORS[name], rel=1e-2, abs=0.06)


def test_suites_name_workloads():
    assert set(workloads.SUITES) == {"decode", "prefill", "mixed", "local", "scaling", "cpu", "sheared"}
    assert all(name == workloads.WORKLOADS[name].name for names in workloads.SUITES.values() for name in names)
    assert all(workloads.WORKLOADS[name].window_size == (511, 0) for name in workloads.SUITES["local"])
    assert {"skew_g", "skew_l", "short32_l"} < set(workloads.SUITES["decode"])


def test_device_inputs_are_a_call_of_the_operator():
    arguments = workloads.device_inputs(TINY, seed=0)
    pages = np.concatenate([arguments["block_table"][0], arguments["block_table"][1]])
    assert sorted(pages.tolist()) == list(range(len(arguments["key_cache"])))
    assert attention(arguments).shape == (8, 4, 32)
    size = sum(arguments[name].nbytes for name in ("q", "key_cache", "value_cache", "rel_logits"))
    assert size == workloads.input_bytes(TINY)


def test_cold_read_curve_never_falls_and_goes_on_at_the_last_rate():
    sizes = [(1 << 16, 1.5), (1 << 20, 4.0), (1 << 21, 3.0), (1 << 25, 9.0)]
    curve = Ceilings(
        reads=tuple(Read(num_bytes=n, us=us, kernel="") for n, us in sizes), matmul_tflops=700, matmul_kernel=""
    )
    times = [curve.cold_read_us(n) for n in np.linspace(0, 1 << 26, 1000)]
    assert times == sorted(times)
    assert curve.cold_read_us(1 << 20) == 3.0  # a larger size took less
    assert curve.cold_read_us((1 << 21) + (15 << 20)) == pytest.approx(6.0)
    assert curve.cold_read_us(1 << 26) == 18.0
    assert curve.floor_us(1 << 25, 7e9) == pytest.approx(10.0)
    assert curve.floor_us(1 << 25, 6e9) == 9.0


def test_ceilings_of_this_machine(monkeypatch):
    monkeypatch.setattr(ceilings, "_CPU_SIZES", (1 << 16, 1 << 20))
    measured = ceilings.measure_ceilings(clocks.WallClock())
    assert [read.num_bytes for read in measured.reads] == [1 << 16, 1 << 20]
    assert all(read.us > 0 for read in measured.reads)
    assert measured.matmul_tflops > 0
    json.dumps(measured.as_json())


def test_time_calls_interleaves_and_drops_warm_rounds(monkeypatch):
    monkeypatch.setattr(clocks, "_settled_seconds", lambda call: call(0))
    clock = CountingClock()
    timings = clocks.time_calls({"fast": lambda _: 0.001, "slow": lambda _: 0.5}, clock, warm_seconds=1.1)
    names = [name for name, _ in clock.rounds]
    assert names[:4] == ["fast", "slow", "fast", "slow"]
    assert (timings["fast"].calls, timings["slow"].calls) == (clocks.MAX_CALLS, 4)
    assert timings["slow"].us_min == 5.0  # rounds 0 and 1 were to warm up
    assert [number for name, number in clock.rounds if name == "slow"] == list(range(6))


def test_a_trace_is_split_at_flushes():
    flush, mine = "jit_inkling_bench_flush", "jit_f"
    spans = [
        Span(5000, 7000, mine),
        Span(0, 1000, mine),  # before the first flush: nobody's
        Span(1000, 2000, flush),
        Span(3000, 4000, mine),
        Span(4500, 4800, mine),
        Span(8000, 9000, flush),
        Span(9100, 9900, flush),
        Span(10000, 13000, mine),
        Span(10500, 11000, mine),  # on another stream, inside the first
    ]
    assert clocks.split_at_flushes(spans) == [4.0, None, 3.0]


def test_every_token_of_a_small_batch_is_judged():
    assert sampled_judge.judged_tokens(TINY).tolist() == list(range(8))


def test_judged_tokens_hold_the_edges():
    case = workloads.WORKLOADS["pre_g_8k"]
    tokens = sampled_judge.judged_tokens(case)
    assert len(set(tokens.tolist())) == sampled_judge.JUDGED_TOKENS
    assert {0, 127, 128, 1023, 1024, 1025, 8063, 8064, 8191} <= set(tokens.tolist())
    assert tokens.tolist() == sampled_judge.judged_tokens(case).tolist()
    ends = np.cumsum(workloads.WORKLOADS["var8_l16"].q_lens)
    assert {0, *(ends - 1).tolist(), *ends[:-1].tolist()} <= set(
        sampled_judge.judged_tokens(workloads.WORKLOADS["var8_l16"]).tolist()
    )


@pytest.mark.parametrize("changes", [{}, {"q_lens": (0, 30, 40), "kv_lens": (5, 31, 39), "window_size": (-1, -1)}])
def test_the_judge_asks_the_oracle_about_the_call(changes, monkeypatch):
    monkeypatch.setattr(sampled_judge, "JUDGED_TOKENS", 32)
    case = dataclasses.replace(TINY, **changes)
    arguments = workloads.device_inputs(case, seed=1)
    judge = sampled_judge.Judge(case, arguments)
    expected = reference_rel_attention(**arguments)
    verdict = judge(jnp.asarray(expected, jnp.float32))
    assert verdict.row_error < 1e-6
    assert not verdict.red
    assert verdict.limit >= 4e-3


def test_a_wrong_result_is_red():
    arguments = workloads.device_inputs(TINY, seed=0)
    judge = sampled_judge.Judge(TINY, arguments)
    right = attention(arguments)
    assert not judge(right).red
    dropped = attention(without_the_bias(arguments))
    assert str(judge(dropped).reason).startswith("row error")
    assert judge(right.at[3, 1, 2].set(jnp.nan)).row_error == math.inf


def test_rows_that_are_not_judged_must_be_finite(monkeypatch):
    monkeypatch.setattr(sampled_judge, "JUDGED_TOKENS", 32)
    case = dataclasses.replace(TINY, q_lens=(60,), kv_lens=(60,))
    arguments = workloads.device_inputs(case, seed=0)
    judge = sampled_judge.Judge(case, arguments)
    other = next(row for row in range(60) if row not in judge.tokens)
    verdict = judge(attention(arguments).at[other].set(jnp.inf))
    assert verdict.reason == "a row outside the judged tokens is not finite"


def test_xla_dense_computes_the_operator():
    case = dataclasses.replace(TINY, q_lens=(1, 7, 0, 3), kv_lens=(40, 33, 5, 2))
    sets = [workloads.device_inputs(case, seed) for seed in range(2)]
    call = peers.PEERS["xla_dense"](case, sets).call
    seen = row_errors(call(3)[:8], reference_rel_attention(**sets[1])[:8])
    assert seen.max() < 8e-3


BATCHES = {
    "one length": ((1, 1), (40, 40)),
    "lengths": ((1, 1, 1, 1), (40, 33, 12, 70)),
    "prompt": ((48,), (48,)),
    "prompts": ((33, 48), (33, 48)),
    "chunk": ((32,), (80,)),
    "mixed": ((1, 17, 1, 20), (40, 50, 33, 20)),
    "verify": ((3, 3), (40, 33)),
}


def check_without_bias(peer: Callable[..., Any], batch: str, window: tuple[int, int]) -> None:
    """Checks a peer by XLA's implementation of the same function; a form that differs from the formula says so."""
    q_lens, kv_lens = BATCHES[batch]
    case = dataclasses.replace(TINY, q_lens=q_lens, kv_lens=kv_lens, window_size=window)
    arguments = workloads.device_inputs(case, seed=0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # libraries are not strict
        call, form, rows = peer(case, [arguments], implementation="xla")
        result = call(0)
    if rows is None:
        assert "without a mask" in form or "no mask" in form
    else:
        assert row_errors(rows(result), reference_rel_attention(**without_the_bias(arguments))).max() < 8e-3


@pytest.mark.parametrize("window", [(-1, -1), (20, 0)], ids=["global", "window"])
@pytest.mark.parametrize("batch", BATCHES)
def test_cudnn_without_the_bias_computes_the_rest(batch, window):
    check_without_bias(jax_libraries.jax_cudnn_nobias, batch, window)


def test_calls_for_each_prompt_compute_the_rest():
    check_without_bias(jax_libraries.jax_cudnn_each_nobias, "prompts", (20, 0))
    with pytest.raises(base.PeerSkippedError, match="for batches of several prompts; jax_cudnn_nobias does this"):
        check_without_bias(jax_libraries.jax_cudnn_each_nobias, "chunk", (20, 0))


def test_tokamax_without_the_bias_computes_the_rest():
    pytest.importorskip("tokamax")
    for window in ((-1, -1), (20, 0)):
        for batch in BATCHES:
            check_without_bias(jax_libraries.tokamax_nobias, batch, window)
        check_without_bias(jax_libraries.tokamax_packed_nobias, "prompts", window)


def test_a_peer_without_the_bias_is_judged():
    arguments = workloads.device_inputs(TINY, seed=0)
    judge = sampled_judge.Judge(TINY, arguments)
    assert judge.without_bias(attention(arguments)).red is True
    assert judge.without_bias(attention(without_the_bias(arguments))).red is False


def test_parts_hold_every_sequence_once_and_all_keys_that_are_seen():
    for name in workloads.SUITES["mixed"] + workloads.SUITES["decode"] + ("var8_g", "chunk_l16_2k_on_30000"):
        case = workloads.WORKLOADS[name]
        for together in (False, True):
            parts = contiguous.parts_of(case, together=together)
            assert sorted(b for part in parts for b in part.sequences) == list(range(len(case.q_lens)))
            facts = [fact for p in parts for fact in zip(p.sequences, p.rows, p.keys, strict=True)]
            for b, rows, keys in facts:
                seen = np.array(workloads.visible_keys(case, case.kv_lens[b] - 1 - np.arange(rows), case.kv_lens[b]))
                assert keys == case.kv_lens[b] - (0 if rows == case.kv_lens[b] else seen[0].min())


def test_a_peer_that_needs_too_much_memory_says_so(monkeypatch):
    monkeypatch.setattr(base, "device_memory", lambda: 10**8)
    with pytest.raises(base.PeerSkippedError, match="contiguous keys and values would take 2 GB; 0 GB are free"):
        jax_libraries.jax_cudnn_nobias(
            workloads.WORKLOADS["dec_g_b128_4k"], [{"softmax_scale": 1.0}], implementation="xla"
        )


def test_results_have_the_schema(bench, capsys):
    status, written = bench("--cases", f"{REAL},cpu_chunk_tp8_64_on_448")
    assert status == 0
    assert set(written) == {"meta", "ceilings", "cases"}
    meta = {"suite", "card", "driver", "jax", "jaxlib", "python", "date", "command", "timer"}
    assert set(written["meta"]) == meta
    assert written["meta"]["card"] == "cpu"
    assert len(written["meta"]["date"]) == len("2026-11-29T12:00:00+00:00")
    first, second = written["cases"]
    fields = "name backend config timer us us_min us_max calls floor_us fraction bytes flops row_error limit red reason"
    assert set(first) == {*fields.split(), "compile_s", "busy", "peers", "forms", "skipped"}
    assert set(first["busy"]) == {"inkling_pallas", *first["peers"]}
    for one in first["busy"].values():
        assert one["us"] > 0
        assert one["mhz"] is one["watts"] is one["mj"] is None
    printed = capsys.readouterr().out
    assert printed.count("no MHz, W and mJ: ") == 1
    assert REAL in printed
    assert bench("--cases", "cpu_chunk_tp8_64_on_448", "--no-busy", "--peers", "none")[1]["cases"][0]["busy"] == {}
    assert (first["name"], second["name"]) == (REAL, "cpu_chunk_tp8_64_on_448")
    assert first["backend"] == "portable"
    assert 0 < first["us_min"] <= first["us"] <= first["us_max"]
    assert first["calls"] == 10
    assert first["fraction"] == pytest.approx(first["floor_us"] / first["us"], rel=1e-3)
    assert 0 < first["row_error"] <= first["limit"]
    assert first["red"] is False
    assert set(first["peers"]) == {"xla_dense"}
    assert set(first["skipped"]) == set(peers.ALL_PEERS) - {"xla_dense"}
    assert first["skipped"]["jax_cudnn_nobias"] == "cuDNN needs an NVIDIA GPU"


def test_a_red_case_is_not_timed(bench, monkeypatch):
    def without_bias(**arguments):
        return attention(without_the_bias(arguments))

    monkeypatch.setattr(run_case, "inkling_rel_attention", without_bias)
    monkeypatch.setattr(run_case, "time_calls", lambda *_: pytest.fail("a red case was timed"))
    status, written = bench("--cases", "cpu_dec_tp8l_b2_1k")
    (case,) = written["cases"]
    assert status == 1
    assert (case["us"], case["us_min"], case["fraction"], case["red"]) == (None, None, None, True)
    assert case["row_error"] > case["limit"]
    assert case["reason"].startswith("row error")


@pytest.mark.parametrize(
    ("error", "status", "red"),
    [(RuntimeError("it broke\nbadly"), 1, True), (NotImplementedError("no such page"), 0, False)],
)
def test_a_failing_backend_is_told(bench, monkeypatch, error, status, red):
    def fail(**arguments):
        raise error

    monkeypatch.setattr(run_case, "inkling_rel_attention", fail)
    got, written = bench("--cases", "cpu_dec_tp8l_b2_1k")
    (case,) = written["cases"]
    assert (got, case["red"], case["us"]) == (status, red, None)
    assert case["reason"] == f"{type(error).__name__}: {str(error).splitlines()[0]}"


def test_a_failing_or_wrong_peer_is_told(bench, monkeypatch):
    def fail(case, sets):
        raise MemoryError("no room")

    def wrong(case, sets, rows=lambda result: result):
        return base.PeerCall(Rotation(jnp.zeros_like, [(sets[0]["q"],)]), "zeros", rows)

    other = functools.partial(wrong, rows=None)
    made = {"fails": fail, "wrong": wrong, "wrong_nobias": wrong, "other_nobias": other}
    monkeypatch.setattr(command, "PEERS", made)
    monkeypatch.setattr(options, "ALL_PEERS", tuple(made))
    _, written = bench("--cases", "cpu_dec_tp8l_b2_1k")
    (case,) = written["cases"]
    assert case["skipped"]["fails"] == "MemoryError: no room"
    assert case["skipped"]["wrong"].startswith("row error 1 is over the limit")
    assert case["skipped"]["wrong_nobias"].startswith("row error 1 is over the limit")
    assert set(case["peers"]) == {"other_nobias"}
    assert case["forms"] == {"other_nobias": "zeros"}


def test_a_run_cut_short_leaves_what_it_timed(bench, monkeypatch, tmp_path):
    def stop(case, *_):
        if case.name == workloads.SUITES["cpu"][1]:
            raise KeyboardInterrupt
        return {"name": case.name, "us": None, "red": False, "reason": None}

    monkeypatch.setattr(command, "run_case", stop)
    with pytest.raises(KeyboardInterrupt):
        bench()
    written = json.loads((tmp_path / "cpu-cpu.json").read_text())
    assert [case["name"] for case in written["cases"]] == [workloads.SUITES["cpu"][0]]
    assert not list(tmp_path.glob("*.part"))


def test_the_compile_cache_is_off_while_compile_times_are_taken(bench, monkeypatch):
    seen = []
    monkeypatch.setattr(
        command, "run_suite", lambda *_: seen.append(jax.config.jax_enable_compilation_cache) or {"cases": []}
    )
    before = jax.config.jax_enable_compilation_cache
    monkeypatch.setattr(command, "table", lambda *_: None)
    command.main(["--suite", "cpu"])
    assert seen == [False]
    assert jax.config.jax_enable_compilation_cache == before


CPU_CASES = ", ".join(workloads.SUITES["cpu"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--suite", "speed"],
            "--suite must be among decode, prefill, mixed, scaling, cpu, sheared, local; got 'speed'. "
            "Check the spelling.",
        ),
        (
            ["--suite", "cpu", "--cases", "cpu_dec_tp8_b2_512,pre_g_8k"],
            f"--cases must be among {CPU_CASES}; got 'pre_g_8k'. Check the spelling.",
        ),
        (
            ["--suite", "cpu", "--peers", "fa4"],
            f"--peers must be among {', '.join(peers.ALL_PEERS)}; got 'fa4'. Check the spelling.",
        ),
        (
            ["--cases", "x"],
            "one of the arguments --suite --compare is required. See `python -m inkling_pallas bench --help`.",
        ),
        (
            ["--suite", "cpu", "--time-limit", "0"],
            "--time-limit must be a positive number of seconds; got 0.0. Cases past it are skipped.",
        ),
        (
            ["--compare", __file__, "none.json"],
            "--compare must name two results files; got 'none.json'. There is no such file.",
        ),
        (
            ["--suite", "cpu", "--out", __file__],
            f"--out must be a folder that can be written to; got {__file__!r}. File exists.",
        ),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(capsys, arguments, message):
    assert command.main(arguments) == 2
    assert capsys.readouterr().err == f"bench: {message}\n"


def test_an_unknown_backend_is_named(capsys):
    assert command.main(["--suite", "cpu", "--backend", "fast"]) == 2
    assert capsys.readouterr().err.startswith("bench: --backend must be among auto, portable")


def test_numbers_in_the_table_are_short():
    case = {"name": "c", "backend": "b", "us": 1234.5, "us_min": 1200.0, "us_max": 1300.0, "floor_us": 9.876}
    case |= {
        "fraction": 0.008,
        "row_error": 0.00251,
        "limit": 0.005,
        "red": False,
        "reason": None,
        "peers": {"p": 12.34},
    }
    head, rows = results.table_of([case])
    assert dict(zip(head, rows[0], strict=True)) == {
        "case": "c",
        "backend": "b",
        "us": "1,234",
        "spread": "1,200..1,300",
        "floor us": "9.88",
        "of floor": "0.01",
        "row error": "2.5e-03",
        "limit": "5.0e-03",
        "p": "12.3",
        "verdict": "ok",
    }


def timed(name, us, **facts):
    return {"name": name, "us": us, "fraction": None, "peers": {}, "skipped": {}} | facts


def times(**us):
    return {name: {"us": one, "mhz": None, "watts": None, "mj": None} for name, one in us.items()}


def test_standings_are_against_the_floor_the_best_library_and_siblings():
    cases = [
        timed("dec_g_b1_64k", 100.0, fraction=0.885),
        timed("dec_g_b1_64k_p16", 106.0),
        timed(
            "pre_g_8k",
            110.6,
            peers={"tokamax_nobias": 100.0, "xla_dense": 9.0, "fa4_nobias": 8.0},
            busy=times(inkling_pallas=120.0, tokamax_nobias=120.0, fa4_nobias=100.0),
        ),
        timed("pre_g_8k_p16", 121.66, busy=times(inkling_pallas=120.0)),
        timed("pre_g_2k", 136.6, peers={"a_nobias": 200.0}),
        timed(
            "var8_g",
            90.0,
            peers={"a_nobias": 100.0, "b_nobias": 200.0, "fa4_nobias": 8.0},
            busy=times(inkling_pallas=110.0, a_nobias=120.0, fa4_nobias=100.0),
        ),
        timed("mix_g_31dec8k_1x2k", 1063.0),
        timed("mix_g_31dec8k", 1000.0),
        timed("mix_g_1x2k", None),
        timed("dec_l8_b1_8k", 1.0, fraction=0.1),
    ]
    rows = results.goals_table_of(cases)[1]
    assert rows == [
        ["dec_g_b1_64k", "0.885 of floor, >= 0.89 MISSED"],
        ["dec_g_b1_64k_p16", "1.060 x dec_g_b1_64k, <= 1.05 MISSED"],
        ["pre_g_8k", "1.106 x tokamax_nobias, <= 1.02 MISSED"],
        ["pre_g_8k", "1.000 x tokamax_nobias, busy, <= 1.02 met"],
        ["pre_g_8k", "1.200 x fa4_nobias, busy, <= 1.09 MISSED"],
        ["pre_g_8k_p16", "1.100 x pre_g_8k, <= 1.03 MISSED"],
        ["pre_g_8k_p16", "1.000 x pre_g_8k, busy, <= 1.03 met"],
        ["var8_g", "0.900 x a_nobias, <= 0.97 met"],
        ["var8_g", "1.100 x fa4_nobias, busy, <= 1.08 MISSED"],
        ["mix_g_31dec8k_1x2k", "1.000 x FA4's published 1,063 us, <= 1 met"],
    ]


def test_every_goal_is_of_a_workload():
    named = {
        *targets._FLOOR,
        *targets._LIBRARIES,
        *targets._PUBLISHED,
        *targets._SIBLINGS,
        *(n for _, names in targets._SIBLINGS.values() for n in names),
    }
    assert named <= set(workloads.WORKLOADS)


def test_reasons_are_told_once_with_their_cases():
    cases = [timed("a", 1.0, skipped={"p": "why", "r": "so"}), timed("b", 1.0, skipped={"p": "why"})]
    assert results.skipped_table_of(cases)[1] == [["p", "why", "all"], ["r", "so", "a"]]


def test_two_files_are_compared(tmp_path, capsys):
    for name, us in {"a": 10.0, "b": 11.0}.items():
        cases = [timed("c", us, peers={"p": 2.0} if name == "a" else {}, busy=times(p=2 * us)), timed("d", None)]
        meta = {"card": "h", "date": name, "jax": "0"}
        (tmp_path / name).write_text(json.dumps({"meta": meta, "cases": cases}))
    assert command.main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = [[word for word in line if word not in "│|"] for line in lines]
    assert ["c", "inkling_pallas", "10.0", "11.0", "1.100"] in found
    assert ["c", "p", "2.00", "-", "-"] in found
    assert ["c", "p,", "busy", "20.0", "22.0", "1.100"] in found


def test_no_case_starts_past_the_time_limit(bench, monkeypatch):
    monkeypatch.setattr(run_case, "run_case", lambda *_: pytest.fail("a case was started"))
    status, written = bench("--time-limit", "1e-9")
    assert status == 0
    assert {case["reason"] for case in written["cases"]} == {"not started: the time limit of 1e-09 s was over"}


def test_a_timing_is_a_median_with_its_spread():
    assert clocks.summarise([3.0, 1.0, 2.0]) == Timing(us=2.0, us_min=1.0, us_max=3.0, calls=3)
