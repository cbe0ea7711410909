"""A benchmark's results as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from inkling_pallas.bench.targets import OURS, best_without_bias, busy_times, standings


def table_of(cases: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of the table of all cases; a peer has a column where it was timed."""
    peers = list(dict.fromkeys(name for case in cases for name in case["peers"]))
    head = ["case", "backend", "us", "spread", "floor us", "of floor", "row error", "limit", *peers, "verdict"]
    rows = []
    for case in cases:
        timed = case["us"] is not None
        row = [case["name"], case["backend"], _number(case["us"])]
        row += [f"{_number(case['us_min'])}..{_number(case['us_max'])}" if timed else "-", _number(case["floor_us"])]
        row += [f"{case['fraction']:.2f}" if timed else "-"]
        row += ["-" if case[name] is None else f"{case[name]:.1e}" for name in ("row_error", "limit")]
        row += [_number(case["peers"].get(name)) for name in peers]
        rows.append([*row, verdict_of(case)])
    return head, rows


def busy_table_of(cases: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of the table of calls without rests: a row for each that was timed so."""
    head = ["case", "of", "us, rested", "us, busy", "MHz", "W", "mJ a call"]
    rows = []
    for case in cases:
        rested = {OURS: case["us"], **case["peers"]}
        for name, busy in case.get("busy", {}).items():
            energy = [_number(busy[unit]) for unit in ("mhz", "watts", "mj")]
            rows.append([case["name"], name, _number(rested.get(name)), _number(busy["us"]), *energy])
    return head, rows


def goals_table_of(cases: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of the table of what is asked of cases: a row for each figure."""
    rows = [[case["name"], str(standing)] for case in cases for standing in standings(case, cases)]
    return ["case", "figure, and what is asked"], rows


def skipped_table_of(cases: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of the table of peers that were not timed: a row for each reason."""
    where: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for peer, reason in case["skipped"].items():
            where.setdefault((peer, reason), []).append(case["name"])
    rows = [[peer, reason, _names(names, len(cases))] for (peer, reason), names in where.items()]
    return ["peer", "reason", "cases"], rows


def _names(names: Sequence[str], total: int) -> str:
    return "all" if len(names) == total > 1 else ", ".join(names)


def comparison_of(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """Returns the head and the rows of the table of two runs: each case of either, and each peer of either."""
    runs = [{(case["name"], who): us for case in cases for who, us in _times(case)} for cases in (first, second)]
    rows = []
    for name, who in dict.fromkeys([*runs[0], *runs[1]]):
        before, after = (run.get((name, who)) for run in runs)
        ratio = f"{after / before:.3f}" if before and after else "-"
        rows.append([name, who, _number(before), _number(after), ratio])
    return ["case", "of", "first", "second", "second / first"], rows


def _times(case: dict[str, Any]) -> list[tuple[str, float | None]]:
    """Returns who was timed in a case, and its time; without rests it is named so."""
    rested = {OURS: case["us"], **case["peers"]}
    return [*rested.items(), *((f"{name}, busy", us) for name, us in busy_times(case).items())]


def verdict_of(case: dict[str, Any]) -> str:
    """Returns a word on a case, and the reason where it was not timed."""
    word = "RED" if case["red"] else "ok" if case["us"] is not None else "not timed"
    return f"{word}: {case['reason']}" if case["reason"] else word


def line_of(case: dict[str, Any]) -> str:
    """Returns a case in one line, with its ratio to the fastest peer that leaves the bias out."""
    if case["us"] is None:
        return f"{case['name']}: {verdict_of(case)}"
    peers = "".join(f", {name} {_number(us)}" for name, us in case["peers"].items())
    floor = f"{case['fraction']:.2f} of the floor {_number(case['floor_us'])}"
    ratio = _ratio_of(case["us"], case["peers"])
    busy = busy_times(case)
    if OURS in busy:
        ratio += f"; busy {_number(busy[OURS])} us{_ratio_of(busy[OURS], busy)}"
    return f"{case['name']}: {_number(case['us'])} us, {floor}{peers}{ratio}"


def _ratio_of(us: float, times: Mapping[str, float]) -> str:
    best = best_without_bias(times)
    return "" if best is None else f"; {us / best[1]:.2f} x {best[0]}"


def _number(us: float | None) -> str:
    return "-" if us is None else f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"
