"""Times the operator on named workloads beside the device's ceilings and peers; a wrong result is not timed."""

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from inkling_pallas.bench import sheared
from inkling_pallas.bench.ceilings import measure_ceilings
from inkling_pallas.bench.clocks import make_clock
from inkling_pallas.bench.energy import Meter
from inkling_pallas.bench.options import Options, parse_options
from inkling_pallas.bench.peers import PEERS
from inkling_pallas.bench.peers.worker import Workers
from inkling_pallas.bench.results import (
    busy_table_of,
    comparison_of,
    goals_table_of,
    line_of,
    skipped_table_of,
    table_of,
)
from inkling_pallas.bench.run_case import empty_results, run_case
from inkling_pallas.bench.workloads import WORKLOADS
from inkling_pallas.core.console import progress, table
from inkling_pallas.core.run_info import card_name, describe_run, write_json

# Peers in processes of their own take long to start and to compile: past this share of the time none is asked.
_WORKER_SHARE = 0.5


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
    if options.compare is not None:
        return _compare(*options.compare)
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are measured
    try:
        results = run_suite(options, shlex.join(["python", "-m", "inkling_pallas", "bench", *argv]))
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
    table(f"{options.suite} on {card_name()}", *table_of(results["cases"]))
    for title, (head, rows) in {
        "calls without rests": busy_table_of(results["cases"]),
        "against what is asked": goals_table_of(results["cases"]),
        "peers that were not timed": skipped_table_of(results["cases"]),
    }.items():
        if rows:
            table(title, head, rows)
    if options.suite == "sheared":
        table("plain and sheared", *sheared.table_of(results["cases"]))
    print(f"wrote {options.path}")
    return int(any(case["red"] for case in results["cases"]))


def run_suite(options: Options, command: str) -> dict[str, Any]:
    """Measures ceilings and cases; rewrites the file after each case, so that a run cut short leaves what it timed."""
    start = time.monotonic()
    workers = Workers(tuple(name for name in options.peers if name not in PEERS), busy=options.busy)
    peers = {name: PEERS[name] for name in options.peers if name in PEERS}
    with contextlib.closing(workers), progress("bench", 1 + len(options.cases)) as step:
        step("ceilings")
        clock = make_clock()
        ceilings = measure_ceilings(clock)
        print(ceilings, flush=True)
        meter = None
        if options.busy:
            meter = Meter()
            if meter.missing is not None:
                print(f"no MHz, W and mJ: {meter.missing}", flush=True)
        meta = describe_run(options.suite, command, clock.name)
        results: dict[str, Any] = {"meta": meta, "ceilings": ceilings.as_json(), "cases": []}
        write_json(options.path, results)
        for name in options.cases:
            step(name)
            spent = (time.monotonic() - start) / options.time_limit
            if spent < 1:
                case = run_case(WORKLOADS[name], options.backend, peers, clock, ceilings, meter)
                workers.time_case(case, hurried=spent > _WORKER_SHARE)
                if options.suite == "sheared":
                    sheared.add_to(case, WORKLOADS[name], clock)
            else:
                reason = f"not started: the time limit of {options.time_limit:g} s was over"
                case = empty_results(WORKLOADS[name], options.backend, ceilings, reason)
            results["cases"].append(case)
            write_json(options.path, results)
            print(line_of(case), flush=True)
    return results


def _compare(first: Path, second: Path) -> int:
    results = [json.loads(path.read_text(encoding="utf-8")) for path in (first, second)]
    for path, result in zip((first, second), results, strict=True):
        print(f"{path}: {result['meta']['card']}, {result['meta']['date']}, jax {result['meta']['jax']}")
    table("us of the first, us of the second", *comparison_of(*(result["cases"] for result in results)))
    return 0
