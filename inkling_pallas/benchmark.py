"""Times the operator on named workloads beside the device's ceilings and peers; a wrong result is not timed."""

import argparse
import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from inkling_pallas import sheared_benchmark
from inkling_pallas.attention import explain, inkling_rel_attention
from inkling_pallas.cases import Case
from inkling_pallas.ceilings import Ceilings, cold_sets, measure_ceilings
from inkling_pallas.console import progress, table
from inkling_pallas.dispatch import BACKENDS
from inkling_pallas.errors import refuse
from inkling_pallas.judging import Judge
from inkling_pallas.peers import PEERS, PeerSkippedError, device_memory
from inkling_pallas.results import card_name, describe_run, line_of, table_of, write_json
from inkling_pallas.timing import Call, Clock, ClockError, QueueClock, TraceClock, make_clock, time_calls
from inkling_pallas.workloads import SUITES, WORKLOADS, cost, device_inputs, input_bytes

# What a case that is not timed lacks.
_MEASURED = ("config", "timer", "us", "us_min", "us_max", "calls", "fraction", "row_error", "limit", "compile_s")
_ARRAYS = ("q", "key_cache", "value_cache", "block_table", "cache_seqlens", "cu_seqlens_q", "rel_logits")
# All sets of inputs together may take this share of the device's memory; peers and results need some, too.
_INPUT_SHARE = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A checked command line."""

    suite: str
    cases: tuple[str, ...]
    backend: str
    peers: tuple[str, ...]
    path: Path


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"{message}. See `python -m inkling_pallas bench --help`.")


def main(argv: Sequence[str]) -> int:
    """Runs `bench` with some arguments.

    Returns:
      0; 1 if a case is red; 2 for a wrong argument, which is named in one line on stderr.
    """
    try:
        options = parse_options(argv)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are measured
    try:
        results = run_suite(options, shlex.join(["python", "-m", "inkling_pallas", "bench", *argv]))
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
    table(f"{options.suite} on {card_name()}", *table_of(results["cases"]))
    if options.suite == "sheared":
        table("plain and sheared", *sheared_benchmark.table_of(results["cases"]))
    print(f"wrote {options.path}")
    return int(any(case["red"] for case in results["cases"]))


def parse_options(argv: Sequence[str]) -> Options:
    """Returns the options, or raises ValueError with what is wrong."""
    parser = _Parser(prog="python -m inkling_pallas bench", description="Time the operator against ceilings and peers.")
    parser.add_argument("--suite", required=True, help=f"one of {', '.join(SUITES)}")
    parser.add_argument(
        "--cases", help="comma-separated, of the suite; the file's name then ends in -partial (default: all)"
    )
    parser.add_argument("--backend", default="auto", help=f"auto or one of {', '.join(BACKENDS)} (default: auto)")
    parser.add_argument("--peers", help=f"comma-separated, or none (default: {','.join(PEERS)})")
    parser.add_argument("--out", default="notebooks/results", help="folder of the JSON file (default: %(default)s)")
    given = parser.parse_args(argv)
    suite = _known("--suite", [given.suite], SUITES)[0]
    backend = _known("--backend", [given.backend], ("auto", *BACKENDS))[0]
    cases = SUITES[suite] if given.cases is None else _known("--cases", given.cases.split(","), SUITES[suite])
    peers = tuple(PEERS)
    if given.peers is not None:
        peers = () if given.peers == "none" else _known("--peers", given.peers.split(","), PEERS)
    name = f"{card_name()}-{suite}{'' if given.cases is None else '-partial'}.json"
    return Options(suite=suite, cases=cases, backend=backend, peers=peers, path=_folder(given.out) / name)


def _known(argument: str, names: Sequence[str], known: Sequence[str] | Mapping[str, Any]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise refuse(argument, f"be among {', '.join(known)}", repr(name), "Check the spelling.")
    return tuple(dict.fromkeys(names))


def _folder(given: str) -> Path:
    path = Path(given)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refuse("--out", "be a folder that can be written to", repr(given), f"{error.strerror}.") from None
    return path


def run_suite(options: Options, command: str) -> dict[str, Any]:
    """Measures ceilings and cases; rewrites the file after each case, so that a run cut short leaves what it timed."""
    with progress("bench", 1 + len(options.cases)) as step:
        step("ceilings")
        clock = make_clock()
        ceilings = measure_ceilings(clock)
        print(ceilings, flush=True)
        meta = describe_run(options.suite, command, clock.name)
        results: dict[str, Any] = {"meta": meta, "ceilings": ceilings.as_json(), "cases": []}
        write_json(options.path, results)
        for name in options.cases:
            step(name)
            case = run_case(WORKLOADS[name], options.backend, options.peers, clock, ceilings)
            if options.suite == "sheared":
                _add_sheared(case, clock)
            results["cases"].append(case)
            write_json(options.path, results)
            print(line_of(case), flush=True)
    return results


def _add_sheared(results: dict[str, Any], clock: Clock) -> None:
    """Fills in what a case does with the bias in the sheared layout."""
    try:
        results["sheared"] = sheared_benchmark.measure(WORKLOADS[results["name"]], results["backend"], clock)
    except Exception as error:  # whatever a kernel raises, the other cases are still to be timed
        results["sheared"] = {"differs": {}, "reason": _one_line(error), "calls": {}}
    results["red"] |= results["sheared"]["reason"] is not None


def run_case(case: Case, backend: str, peers: Sequence[str], clock: Clock, ceilings: Ceilings) -> dict[str, Any]:
    """Returns the results of one case; whatever goes wrong is told in `reason`, and `us` is None."""
    needed = cost(case)
    floor = round(ceilings.floor_us(needed.num_bytes, needed.flops), 3)
    results: dict[str, Any] = {"name": case.name, "backend": backend, **dict.fromkeys(_MEASURED), "floor_us": floor}
    results |= {
        "bytes": needed.num_bytes,
        "flops": needed.flops,
        "red": False,
        "reason": None,
        "peers": {},
        "skipped": {},
    }
    try:
        _run(case, results, peers, clock)
    except (NotImplementedError, ClockError) as error:
        results["reason"] = _one_line(error)
    except Exception as error:  # whatever a backend raises, the other cases are still to be timed
        results.update(red=True, reason=_one_line(error))
    return results


def _run(case: Case, results: dict[str, Any], peers: Sequence[str], clock: Clock) -> None:
    """Judges and times one case, and fills in its results as it goes."""
    room = max(1, int(_INPUT_SHARE * device_memory() / input_bytes(case)))
    sets = [device_inputs(case, seed) for seed in range(min(room, cold_sets(results["bytes"])))]
    choice = explain(**sets[0], backend=results["backend"])
    results.update(backend=choice.backend, config=str(choice.config))
    ours, results["compile_s"] = _compile(sets, choice.backend)
    judge = Judge(case, sets[0])
    verdict = judge(ours(0))
    results.update(limit=verdict.limit, red=verdict.red, reason=verdict.reason)
    results["row_error"] = verdict.row_error if math.isfinite(verdict.row_error) else None
    if verdict.red:
        return
    calls, results["skipped"] = _peer_calls(case, sets, judge, peers)
    # Its loops wait for the host, which takes longer under the profiler than it does otherwise.
    own_clock = QueueClock() if choice.backend == "portable" and isinstance(clock, TraceClock) else clock
    together = {"": ours, **calls} if own_clock is clock else calls
    timings = time_calls(together, clock) if together else {}
    mine = timings.pop("") if own_clock is clock else time_calls({"": ours}, own_clock)[""]
    results["timer"] = own_clock.name
    results.update({name: round(value, 3) for name, value in dataclasses.asdict(mine).items()})
    results["fraction"] = round(results["floor_us"] / mine.us, 4)
    results["peers"] = {name: round(timing.us, 3) for name, timing in timings.items()}


def _compile(sets: Sequence[dict[str, Any]], backend: str) -> tuple[Call, float]:
    """Returns the operator's call on the sets and the seconds that tracing and compiling it took."""
    static = {name: value for name, value in sets[0].items() if name not in _ARRAYS}
    arrays = [{name: inputs[name] for name in _ARRAYS} for inputs in sets]
    operator = jax.jit(lambda arrays: inkling_rel_attention(**arrays, **static, backend=backend))
    start = time.perf_counter()
    compiled = operator.lower(arrays[0]).compile()
    return lambda number: compiled(arrays[number % len(arrays)]), round(time.perf_counter() - start, 3)


def _peer_calls(
    case: Case, sets: Sequence[dict[str, Any]], judge: Judge, names: Sequence[str]
) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns the calls of peers that can do a case, and why the others cannot; those with the bias are judged."""
    calls, skipped = {}, {}
    for name in names:
        try:
            call = PEERS[name](case, sets)
            result = jax.block_until_ready(call(0))
            reason = None if name.endswith("_nobias") else judge(result).reason
        except PeerSkippedError as error:
            reason = str(error)
        except Exception as error:  # a peer may fail in any way; that is told, and the case goes on
            reason = _one_line(error)
        if reason is None:
            calls[name] = call
        else:
            skipped[name] = reason
    return calls, skipped


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
