"""What a run of serve-sim has shown: counted as it goes, as JSON and as a table."""

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inkling_pallas.core.run_info import card_name, describe_run, write_json
from inkling_pallas.serving.scheduler import Scheduler
from inkling_pallas.serving.server import AttentionServer, Verdict

_PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(kw_only=True)
class Tally:
    """What a run has shown so far."""

    step_seconds: list[float] = dataclasses.field(default_factory=list)
    rows: int = 0
    checked_steps: int = 0
    checked_rows: int = 0
    worst: Verdict | None = None
    red: list[str] = dataclasses.field(default_factory=list)

    def judged(self, step: int, verdicts: Sequence[Verdict], rows: int) -> None:
        """Adds the verdicts on a step."""
        self.checked_steps += 1
        self.checked_rows += rows * len(verdicts)
        for verdict in verdicts:
            if self.worst is None or not verdict.row_error / verdict.limit <= self.worst.row_error / self.worst.limit:
                self.worst = verdict
            if verdict.red:
                error = f"row error {verdict.row_error:.2e} over {verdict.limit:.2e}"
                self.red.append(f"step {step}, {verdict.kind} layer {verdict.layer}: {error}")


def report_of(scheduler: Scheduler, server: AttentionServer, tally: Tally, compiled: int) -> dict[str, Any]:
    """Returns what a run has shown, as JSON has it."""
    seconds = sum(tally.step_seconds)
    generated = sum(progress.generated for progress in scheduler.finished)
    recomputed = sum(preemption.lost_keys for preemption in scheduler.preemptions)
    times = np.percentile(tally.step_seconds, _PERCENTILES) * 1e3
    worst = tally.worst
    return {
        "requests": len(scheduler.finished),
        "steps": len(tally.step_seconds),
        "seconds": round(seconds, 3),
        "rows_per_s": round((tally.rows - recomputed) / seconds, 1),
        "generated_per_s": round(generated / seconds, 1),
        "rows": tally.rows,
        "generated": generated,
        "recomputed_rows": recomputed,
        "preemptions": len(scheduler.preemptions),
        "step_ms": {f"p{p}": round(float(ms), 3) for p, ms in zip(_PERCENTILES, times, strict=True)},
        "compiled_variants": server.traces,
        "compiled_in_warmup": compiled,
        "pages": {name: {"pool": p.num_pages, "peak": p.peak} for name, p in scheduler.pools.items()},
        "checked_steps": tally.checked_steps,
        "checked_rows": tally.checked_rows,
        "worst_row_error": None if worst is None or not np.isfinite(worst.row_error) else worst.row_error,
        "limit_there": None if worst is None else worst.limit,
        "red": tally.red,
    }


def lines_of(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the report's lines."""
    step_ms, pages = report["step_ms"], report["pages"]
    error = "over all" if report["worst_row_error"] is None else f"{report['worst_row_error']:.2e}"
    warm = f"{report['compiled_variants']}, {report['compiled_in_warmup']} of them before the first request"
    lines = {
        "requests, steps": f"{report['requests']}, {report['steps']}",
        "rows (tokens) / s": f"{report['rows_per_s']:,.1f}",
        "generated tokens / s": f"{report['generated_per_s']:,.1f}",
        "step ms, " + " / ".join(step_ms): " / ".join(f"{ms:.2f}" for ms in step_ms.values()),
        "compiled variants": warm,
        "pages in use, peak": ", ".join(f"{name} {p['peak']} of {p['pool']}" for name, p in pages.items()),
        "preemptions": f"{report['preemptions']}, {report['recomputed_rows']:,} rows computed again",
        "checked": f"{report['checked_rows']:,} rows in {report['checked_steps']} steps",
        "worst row error, limit": f"{error}, {report['limit_there']:.2e}",
    }
    return list(lines.items())


def write_report(options: argparse.Namespace, argv: Sequence[str], report: dict[str, Any]) -> None:
    """Writes the report with what must be known to read it."""
    meta = describe_run("serve-sim", f"python -m inkling_pallas serve-sim {shlex.join(argv)}".strip(), "host clock")
    chosen = {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}
    del chosen["out"]
    trace = options.trace.stem if options.trace else "shipped"
    path = options.out / f"{card_name()}-serve-sim-{trace}-{report['requests']}.json"
    write_json(path, {"meta": meta, "options": chosen, "result": report})
    print(f"wrote {path}")
