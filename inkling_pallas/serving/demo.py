"""The main job: a serving step of Inkling's attention on request lengths of a trace, checked against the oracle.

For a global and a local layer: write the cache, run one mixed batch (a prefill chunk, a chunked prefill, decodes), then
decode steps over the growing cache, all through one jitted function per batch shape.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from inkling_pallas.attention import check_batch, explain
from inkling_pallas.core.console import positive, progress, table
from inkling_pallas.serving.layer import Layer, LayerServer, Step, mixed_step
from inkling_pallas.serving.options import add_layer_options, layers_of
from inkling_pallas.serving.trace import TraceError, read_trace
from inkling_pallas.testing.limits import baseline_rel_attention, error_limit, row_errors
from inkling_pallas.testing.reference import reference_rel_attention

_COLUMNS = ("case", "tokens", "keys", "backend", "ms", "row error", "limit", "margin")
_TIMED_CALLS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one case showed."""

    name: str
    tokens: int
    keys: int
    backend: str
    ms: float
    row_error: float
    limit: float
    margin: float

    @property
    def red(self) -> bool:
        """True if the case failed."""
        return not self.row_error <= self.limit

    def cells(self) -> tuple[str, ...]:
        """Returns the row of the table."""
        error = f"{self.row_error:.2e}" + (" RED" if self.red else "")
        numbers = (f"{self.ms:.2f}", error, f"{self.limit:.2e}", f"{self.margin:.0f} x")
        return (self.name, f"{self.tokens:,}", f"{self.keys:,}", self.backend, *numbers)


def measure(server: LayerServer, name: str, step: Step) -> Result:
    """Runs a step, times it once compiled, and judges it against the oracle."""
    call = server.begin(step)
    whole = server.static | call
    check_batch(**whole)
    out = server.attend(**call)
    seconds = [_seconds(server, call) for _ in range(_TIMED_CALLS)]
    whole = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, whole)
    expected = reference_rel_attention(**whole)
    limit = error_limit(row_errors(baseline_rel_attention(**whole), expected), server.layer.dtype)
    no_bias = reference_rel_attention(**dict(whole, rel_logits=np.zeros_like(whole["rel_logits"])))
    return Result(
        name=name,
        tokens=sum(step.q_lens),
        keys=sum(step.kv_lens),
        backend=explain(**whole).backend,
        ms=1e3 * statistics.median(seconds),
        row_error=float(row_errors(out, expected).max()),
        limit=limit,
        margin=float(row_errors(no_bias, expected).max()) / limit,
    )


def _seconds(server: LayerServer, call: dict[str, Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(server.attend(**call))
    return time.perf_counter() - start


def run_layer(layer: Layer, options: argparse.Namespace, show: Callable[[str], None]) -> list[Result]:
    """Returns the results of one layer: the mixed batch, then each decode step over the growing cache."""
    step = mixed_step(read_trace(options.trace)[: options.requests], options.chunk)
    capacity = [length + options.decode_steps for length in step.kv_lens]
    server = LayerServer(layer, capacity, seed=options.seed, backend=options.backend)
    show(f"{layer.name} layer, prefill chunk + chunked prefill + decodes")
    server.fill([kv_len - q_len for q_len, kv_len in zip(step.q_lens, step.kv_lens, strict=True)])
    results = [measure(server, f"{layer.name}: mixed batch", step)]
    for number in range(1, options.decode_steps + 1):
        show(f"{layer.name} layer, decode step {number}")
        step = step.next_decode()
        results.append(measure(server, f"{layer.name}: decode step {number}", step))
    return results


def parser() -> argparse.ArgumentParser:
    """Returns the demo's command line."""
    p = argparse.ArgumentParser(
        prog="python -m inkling_pallas demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument(
        "--trace", type=Path, help="CSV with columns ContextTokens, GeneratedTokens (default: one is shipped)"
    )
    counts = {
        "--requests": (8, "requests taken from the trace"),
        "--chunk": (256, "most rows of one sequence in a step"),
        "--decode-steps": (3, "decode steps after the mixed batch"),
    }
    for option, (default, meaning) in counts.items():
        p.add_argument(option, type=positive, default=default, help=f"{meaning} (default {default})")
    add_layer_options(p)
    p.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw bias table, weights, pages and bands")
    return p


def main(argv: Sequence[str]) -> int:
    """Runs the demo; returns 0 when every case is within its limit, 1 when one is red, 2 for bad options or input."""
    options = parser().parse_args(argv)
    layers = layers_of(options)
    try:
        read_trace(options.trace)
        with progress("demo", len(layers) * (1 + options.decode_steps)) as show:
            results = [result for layer in layers for result in run_layer(layer, options, show)]
        if options.plot:
            _plot(options.plot)
    except (TraceError, ValueError, NotImplementedError, ImportError, OSError) as error:
        print(f"demo: {error}")
        return 2
    title = f"One serving step and {options.decode_steps} decode steps on {jax.devices()[0].device_kind}"
    table(title, _COLUMNS, [result.cells() for result in results])
    red = [result.name for result in results if result.red]
    verdict = f"RED: {', '.join(red)} over the limit." if red else "Green: all rows are within their limit of float64."
    print(f"{verdict} The margin says how many limits away the output would be without the bias.")
    return 1 if red else 0


def _plot(path: Path) -> None:
    from inkling_pallas.plots.call import example_call, save_overview

    save_overview(path, example_call())
    print(f"wrote {path}")
