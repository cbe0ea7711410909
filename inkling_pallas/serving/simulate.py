"""Serves the requests of a trace with attention layers alone: continuous batching, checked against the oracle."""

import argparse
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from inkling_pallas.core.console import meter, table
from inkling_pallas.serving.options import build, parser
from inkling_pallas.serving.page_pool import PageOwnershipError
from inkling_pallas.serving.report import Tally, lines_of, report_of, write_report
from inkling_pallas.serving.scheduler import Scheduler
from inkling_pallas.serving.server import AttentionServer
from inkling_pallas.serving.trace import TraceError
from inkling_pallas.serving.warmup import warmup

_PREEMPTIONS_SHOWN = 3  # the table counts all of them


def serve(
    scheduler: Scheduler, server: AttentionServer, options: argparse.Namespace, show: Callable[[int, str], None]
) -> Tally:
    """Runs every request to its end.

    Raises:
      PageOwnershipError: for a page that is owned twice, or leaks.
    """
    tally, rng = Tally(), np.random.default_rng(options.seed)
    while scheduler.unfinished:
        start, preempted = time.perf_counter(), len(scheduler.preemptions)
        scheduled = scheduler.schedule()
        step = server.prepare(scheduled, scheduler.pools)
        outs = server.run(step)
        tally.step_seconds.append(time.perf_counter() - start)
        number = len(tally.step_seconds)
        for preemption in scheduler.preemptions[preempted:_PREEMPTIONS_SHOWN]:
            print(f"step {number}: {preemption}")
        q_lens = [rows.end - rows.begin for rows in scheduled]
        tally.rows += sum(q_lens)
        scheduler.complete(scheduled)
        if number % options.check_every == 0 or not scheduler.unfinished:
            chosen = rows_to_check(q_lens, options.check_rows, rng)
            tally.judged(number, server.judge(step, outs, chosen), len(chosen))
            check_pages(scheduler)
        in_use = ", ".join(f"{name} {pool.in_use}/{pool.num_pages}" for name, pool in scheduler.pools.items())
        label = f"step {number}, {sum(q_lens)} rows of {len(q_lens)} requests, pages {in_use}"
        show(len(scheduler.finished), label)
    return tally


def rows_to_check(q_lens: Sequence[int], count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns up to `count` packed rows (0: all): the first and last of each request before others."""
    ends = np.cumsum(q_lens)
    everything = rng.permutation(ends[-1])
    if count == 0:
        return everything
    edges = rng.permutation(np.concatenate([ends - 1, ends - q_lens]))
    return np.array(list(dict.fromkeys([*edges.tolist(), *everything.tolist()]))[:count])


def check_pages(scheduler: Scheduler) -> None:
    """Raises PageOwnershipError if a page has two owners or none, or if any is owned when all requests are done."""
    for name, pool in scheduler.pools.items():
        pool.check()
        if not scheduler.unfinished and pool.in_use:
            raise PageOwnershipError(f"pool {name!r} has {pool.in_use} pages in use after the last request: a leak.")


def main(argv: Sequence[str]) -> int:
    """Serves a trace; returns 0 when it is green, 1 when a row or a page is wrong, 2 for bad options or input."""
    options = parser().parse_args(argv)
    try:
        scheduler, server = build(options)
        if options.out:  # before the work, so that a folder that cannot be made costs none
            options.out.mkdir(parents=True, exist_ok=True)
        warmup(server.run_padding, server.buckets)
        compiled = server.traces
        with meter("serve-sim", len(scheduler.waiting)) as show:
            tally = serve(scheduler, server, options, show)
    except (TraceError, ValueError, NotImplementedError, OSError) as error:
        print(f"serve-sim: {error}")
        return 2
    except PageOwnershipError as error:
        print(f"serve-sim: RED: {error}")
        return 1
    report = report_of(scheduler, server, tally, compiled)
    title = f"Serving on {jax.devices()[0].device_kind}, backend {options.backend!r}"
    table(title, ("what", "result"), lines_of(report))
    if options.out:
        write_report(options, argv, report)
    red = f"RED: {len(tally.red)} layers of checked steps are over the limit; the first: {tally.red[:1]}"
    print(red if tally.red else "Green: every checked row is within its limit of float64, and no page was lost.")
    return 1 if tally.red else 0
