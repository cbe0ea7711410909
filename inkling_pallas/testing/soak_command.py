"""`check --random N`: random batches of fixed shapes, beside poison and garbage, against a dense float32 form."""

import argparse
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from inkling_pallas.core.console import meter, table
from inkling_pallas.core.dispatch import BACKENDS, machine_backends
from inkling_pallas.core.errors import refuse
from inkling_pallas.testing.soak import Soak
from inkling_pallas.testing.soak_processes import reports
from inkling_pallas.testing.soak_record import Tally, read_record, record_path, write_record
from inkling_pallas.testing.soak_shapes import KINDS

_COLUMNS = ("shape", "batches", "wrong", "worst error / limit", "verdict")
_LIMIT = 2**31
_SECONDS_OF_NEWS, _SECONDS_OF_FILE = 5.0, 30.0
_SHOWN = 5  # wrong batches of a shape


def add_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the soak."""
    p.add_argument(
        "--random",
        metavar="N",
        help="judge N random batches of fixed shapes in place of cases; memory that no row may see is NaN. Goes on "
        "from the file in --out",
    )
    p.add_argument("--seed", metavar="S", help="of the random batches, 0 by default")
    p.add_argument("--first", metavar="K", help="number of the first random batch, 0 by default")
    p.add_argument("--processes", metavar="P", help="that share the shapes of the random batches, 1 by default")


def asked_for(options: argparse.Namespace) -> bool:
    """True if an option of the soak is given."""
    return any(getattr(options, name) is not None for name in ("random", "seed", "first", "processes"))


def main(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs the soak; returns 0 when nothing is wrong, 1 when something is, 2 for a bad option, 130 if interrupted."""
    try:
        processes = _integer("--processes", options.processes or "1", 1, 1024)
        runs = _runs(options, processes)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
        paths = [record_path(options.out, soak) if options.out else None for soak in runs]
        tallies = [read_record(path, soak) for path, soak in zip(paths, runs, strict=True)]
    except (ValueError, OSError) as error:
        print(f"check: {error}")
        return 2
    command = f"python -m inkling_pallas check {shlex.join(argv)}"
    status = 0
    for soak, path, found in zip(runs, paths, tallies, strict=True):
        finished = _run(soak, processes, found, path, command)
        bad = _show(soak, found, quiet=options.quiet)
        if not finished:
            print(
                f"check: interrupted; {'the same command goes on from ' + str(path) if path else 'no --out, no file'}."
            )
            return 130
        status = max(status, int(bad))
    return status


def _runs(options: argparse.Namespace, processes: int) -> list[Soak]:
    """Returns the run of each backend; raises ValueError for a wrong option."""
    random = _integer("--random", options.random, 1, _LIMIT - 1)
    seed = _integer("--seed", options.seed or "0", 0, _LIMIT - 1)
    first = _integer("--first", options.first or "0", 0, _LIMIT - 1)
    if first + random > _LIMIT:
        raise refuse("--first", f"be at most 2**31 - {random}", first, "Batches are numbered from 0 to 2**31 - 1.")
    if options.full:
        raise refuse("--full", "be left out with --random", "both", "Run cases and random batches one after the other.")
    if options.kind is not None and options.kind not in KINDS:
        raise refuse("--kind", f"be one of {', '.join(KINDS)}", repr(options.kind), "These are those of --random.")
    if options.backend is not None and options.backend not in BACKENDS:
        raise refuse("--backend", f"be one of {', '.join(BACKENDS)}", repr(options.backend), "Leave it out for all.")
    if processes > 1:  # each would take most of the card's memory; read when jax starts
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    backends = machine_backends()
    runs = [
        Soak(
            seed=seed,
            first=first,
            random=random,
            backend=backend,
            bias=options.bias,
            layout=options.layout,
            kind=options.kind,
            interpret=backend not in backends,
        )
        for backend in ([options.backend] if options.backend else backends)
    ]
    if not runs[0].shapes():
        advice = "Ask for more batches, or leave out --kind."
        raise refuse("--random", f"reach a batch of kind {options.kind!r} from {first} on", random, advice)
    return runs


def _integer(option: str, text: str | None, least: int, most: int) -> int:
    """Returns the integer that an option holds."""
    advice = "Name how many batches to judge." if option == "--random" else "Give a whole number."
    digits = (text or "").strip()
    if not digits.isdecimal() or not least <= int(digits) <= most:
        raise refuse(option, f"be an integer from {least} to {most}", repr(text), advice)
    return int(digits)


def _run(soak: Soak, processes: int, tallies: dict[str, Tally], path: Path | None, command: str) -> bool:
    """Judges what is not yet in the tallies, and tells of it; returns False if it was interrupted."""
    if soak.interpret:
        print(f"check: no card for {soak.backend} here; the Pallas interpreter runs its batches, slowly.")
    start = told = saved = time.monotonic()
    before = sum(tally.done for tally in tallies.values())
    total = sum(len(soak.indices(shape)) for shape in soak.shapes())
    try:
        with meter(f"check {soak.backend}", total) as show:
            for report in reports(soak, {name: tally.done for name, tally in tallies.items()}, processes):
                tallies[report.shape].add(report)
                now, done = time.monotonic(), sum(tally.done for tally in tallies.values())
                if now - told >= _SECONDS_OF_NEWS:
                    told = now
                    wrong = sum(tally.wrong for tally in tallies.values())
                    show(done, f"{wrong} wrong, {(done - before) / (now - start):.1f} batches/s, {report.shape}")
                if path and now - saved >= _SECONDS_OF_FILE:
                    saved = now
                    write_record(path, soak, tallies, command)
    except KeyboardInterrupt:
        return False
    finally:
        if path:
            write_record(path, soak, tallies, command)
    spent = max(time.monotonic() - start, 1e-9)
    done = sum(tally.done for tally in tallies.values())
    print(f"check {soak.backend}: {done - before} batches in {spent:.0f} s, {(done - before) / spent:.1f} batches/s.")
    return True


def _show(soak: Soak, tallies: dict[str, Tally], *, quiet: bool) -> bool:
    """Prints the verdict on each shape, the wrong batches with what repeats them, and the sums; True if any is red."""
    rows = [_row(name, tally) for name, tally in tallies.items()]
    shown = [row for row in rows if not quiet or row[-1] != "ok"]
    if shown:
        table(f"{soak.backend} on {jax.devices()[0].device_kind}, jax {jax.__version__}", _COLUMNS, shown)
    for tally in tallies.values():
        for batch in tally.batches[:_SHOWN]:
            print(_sentence(soak, batch))
        if tally.wrong > _SHOWN:
            print(f"... and {tally.wrong - _SHOWN} more of {tally.batches[0]['shape']}.")
    wrong, done = (sum(getattr(tally, name) for tally in tallies.values()) for name in ("wrong", "done"))
    failed, refused = (sum(bool(getattr(t, name)) for t in tallies.values()) for name in ("failed", "refused"))
    print(
        f"{soak.backend}: {done} random batches of seed {soak.seed} from {soak.first} on: {wrong} wrong; "
        f"{failed} shapes failed, {refused} refused (portable takes those)."
    )
    if not done:
        print("check: no batch was judged.")
    return bool(wrong or failed or not done)


def _row(name: str, tally: Tally) -> tuple[str, ...]:
    verdict = "RED" if tally.wrong else "ok"
    if tally.failed:
        verdict = f"RED: {tally.failed}"
    elif tally.refused:
        verdict = f"refused: {tally.refused}"
    return (name, str(tally.done), str(tally.wrong), f"{tally.worst:.3f}", verdict)


def _sentence(soak: Soak, batch: dict[str, Any]) -> str:
    """Returns what is wrong with a batch, and the command that judges it again."""
    row, lse_row = tuple(batch["row"]), tuple(batch["lse_row"])
    return (
        f"RED: {batch['shape']}, seed {soak.seed}, batch {batch['batch']}: {batch['rows']} rows of one head are wrong; "
        f"error {batch['error']} of out at (token, head) {row}, limit {batch['limit']}; "
        f"LSE {batch['lse_error']} times its limit at {lse_row}. Again: {_again(soak, batch['batch'])}"
    )


def _again(soak: Soak, batch: int) -> str:
    """Returns the command that judges one batch again."""
    more = [f"--random 1 --seed {soak.seed} --first {batch} --backend {soak.backend}"]
    more += [f"--bias {soak.bias}"] if soak.bias != "plain" else []
    more += [f"--layout {soak.layout}"] if soak.layout != "separate" else []
    return f"python -m inkling_pallas check {' '.join(more)}"
