"""Results files of the benchmark as tables and series: what README, plots and the notebook of measurements show."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inkling_pallas.bench.targets import NO_BIAS, OURS, best_without_bias, busy_times, standings
from inkling_pallas.bench.workloads import SUITES, WORKLOADS
from inkling_pallas.testing.cases import Case

# A results file: `meta`, `ceilings`, `cases`.
Results = Mapping[str, Any]
_PAGE = 128  # of the sweeps


class Point(NamedTuple):
    """A timed case of a sweep."""

    x: int
    case: Mapping[str, Any]


def load_results(folder: str | Path, card: str = "nvidia-h200") -> dict[str, Results]:
    """Returns the results of each suite that was run whole on a card, by suite.

    Args:
      folder: of the JSON files that `bench` writes, named {card}-{suite}.json.
      card: the card's name as file names have it.
    """
    paths = {suite: Path(folder) / f"{card}-{suite}.json" for suite in SUITES}
    return {suite: json.loads(path.read_text(encoding="utf-8")) for suite, path in paths.items() if path.is_file()}


def all_cases(results: Mapping[str, Results]) -> list[Mapping[str, Any]]:
    """Returns the timed cases of all suites; of a case that is in several, the first."""
    cases: dict[str, Mapping[str, Any]] = {}
    for suite in results.values():
        for case in suite["cases"]:
            if case["us"] is not None:
                cases.setdefault(case["name"], case)
    return list(cases.values())


def joined(results: Mapping[str, Results]) -> Results:
    """Returns the timed cases of all suites as one, with the `meta` of the first."""
    first = next(iter(results.values()))
    return dict(first, meta=dict(first["meta"], suite="all suites"), cases=all_cases(results))


def by_keys(cases: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Returns decodes of one sequence, by layer: x is the number of keys."""
    return _sweep(cases, lambda case: case.q_lens == (1,), lambda case: case.kv_lens[0])


def by_batch(cases: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Returns decodes of 8,192 keys a sequence, by layer: x is the number of sequences, a power of two."""

    def belongs(case: Case) -> bool:  # the decodes of a mixed batch, timed alone, are 31
        return set(case.q_lens) == {1} and set(case.kv_lens) == {8192} and len(case.q_lens).bit_count() == 1

    return _sweep(cases, belongs, lambda case: len(case.q_lens))


def by_rows(cases: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Returns prefills of one sequence, by layer: x is the number of rows."""
    return _sweep(
        cases, lambda case: len(case.q_lens) == 1 and case.q_lens == case.kv_lens, lambda case: case.q_lens[0]
    )


def _sweep(
    cases: Sequence[Mapping[str, Any]], takes: Callable[[Case], bool], x_of: Callable[[Case], int]
) -> dict[str, list[Point]]:
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for case in cases:
        workload = WORKLOADS.get(case["name"])
        if workload is None or workload.block_size != _PAGE or workload.max_seqlen_q is not None:
            continue
        if takes(workload):
            found.setdefault(layer_of(workload), {})[x_of(workload)] = case
    return {layer: [Point(x, points[x]) for x in sorted(points)] for layer, points in found.items() if len(points) > 1}


def layer_of(case: Case) -> str:
    """Returns which layer a workload is of, in words."""
    kind = "global" if case.window_size == (-1, -1) else "local"
    return f"{kind}, heads {case.num_heads}/{case.num_kv_heads}"


# Workloads with very unequal lengths, and what the same work costs with equal ones.
SKEWED: Mapping[str, str] = {"skew_g": "even32_g", "skew_l": "short32_l", "var8_g": "even8_g"}


def skew_pairs(results: Mapping[str, Results]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Returns (skewed, equal lengths) where both were timed in one run."""
    runs = [{case["name"]: case for case in all_cases({suite: one})} for suite, one in results.items()]
    pairs = (next(((run[a], run[b]) for run in runs if a in run and b in run), None) for a, b in SKEWED.items())
    return [pair for pair in pairs if pair is not None]


def provenance(results: Results) -> str:
    """Returns in one line where a results file comes from."""
    meta = results["meta"]
    return f"{meta['card']}, driver {meta['driver']}, jax {meta['jax']}, {meta['date'][:10]}: `{meta['command']}`"


def markdown_table(results: Results) -> str:
    """Returns the Markdown table of a suite: what each case reached, what is asked of it, why it was not timed."""
    lines = [
        "| case | us | busy, us | busy, mJ | floor, us | of floor | fastest without bias, us | busy | asked |",
        "|---|--:|--:|--:|--:|--:|---|---|---|",
    ]
    for case in results["cases"]:
        if case["us"] is None:
            lines.append(f"| {case['name']} |{' - |' * 7} not timed: {case['reason']} |")
            continue
        libraries = [_library(times) for times in (case["peers"], busy_times(case))]
        busy = case.get("busy", {}).get(OURS, {})
        asked = "; ".join(map(str, standings(case, results["cases"]))) or "-"
        ours = [_number(x) for x in (case["us"], busy.get("us"), busy.get("mj"), case["floor_us"])]
        cells = [case["name"], *ours, f"{case['fraction']:.3f}", *libraries, asked]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _library(times: Mapping[str, float]) -> str:
    best = best_without_bias(times)
    return "-" if best is None else f"{best[1]:,.1f} {best[0].removesuffix(NO_BIAS)}"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:,.1f}"
