"""Plots of results files: cost against length, batch and skew; roofline; peers. For a light and a dark page.

They return a matplotlib Figure. matplotlib comes with the extra `demo` and is imported when first used.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inkling_pallas.bench import series as data
from inkling_pallas.bench.targets import OURS, busy_times
from inkling_pallas.plots.call import new_figure

_MARKERS = ("o", "s", "^", "D", "v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of a page."""

    paper: str
    ink: str
    faint: str
    colours: tuple[str, ...]


LIGHT = Theme(
    paper="white", ink="#24292f", faint="#d0d7de", colours=("#1f5fa8", "#c2570c", "#2f7d4f", "#8a4fbf", "#a8325c")
)
DARK = Theme(
    paper="#0d1117", ink="#e6edf3", faint="#30363d", colours=("#6cb2ff", "#ffab5e", "#7ddb9d", "#cfa1ff", "#ff8fb1")
)


def plot_costs(results: Mapping[str, data.Results], theme: Theme = LIGHT) -> Any:
    """Returns a Figure of time against keys, sequences and rows, with the floor of each.

    Args:
      results: from `series.load_results`.
      theme: the page's colours.

    Raises:
      ImportError: without matplotlib.
    """
    cases = data.all_cases(results)
    sweeps = {
        "Decode of one sequence": ("keys", data.by_keys(cases)),
        "Decode of 8,192 keys each": ("sequences", data.by_batch(cases)),
        "Prefill of one sequence": ("rows", data.by_rows(cases)),
    }
    shown = {title: sweep for title, sweep in sweeps.items() if sweep[1]}
    with _themed(theme, 4.6 * max(1, len(shown)), 3.9) as figure:
        for axes, (title, (x_name, series)) in zip(_row(figure, len(shown)), shown.items(), strict=True):
            _draw_sweep(axes, series, theme)
            axes.set(title=title, xlabel=x_name, ylabel="microseconds")
    return figure


def _draw_sweep(axes: Any, series: Mapping[str, Sequence[data.Point]], theme: Theme) -> None:
    for (layer, points), colour, marker in zip(series.items(), theme.colours, _MARKERS, strict=False):
        x = [point.x for point in points]
        axes.plot(x, [point.case["us"] for point in points], color=colour, marker=marker, label=layer)
        axes.plot(x, [point.case["floor_us"] for point in points], color=colour, ls=":", lw=1.2)
    axes.plot([], [], color=theme.ink, ls=":", lw=1.2, label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({point.x for points in series.values() for point in points})
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, labelcolor=theme.ink)


def plot_skew(results: Mapping[str, data.Results], theme: Theme = LIGHT) -> Any:
    """Returns a Figure of batches with unequal lengths beside equal ones: each as a fraction of its floor.

    Args:
      results: from `series.load_results`.
      theme: the page's colours.

    Raises:
      ImportError: without matplotlib.
    """
    pairs = data.skew_pairs(results)
    with _themed(theme, 6.5, 1.3 + 0.75 * max(1, len(pairs))) as figure:
        axes = figure.add_subplot()
        for place, pair in enumerate(pairs):
            for offset, case, colour in zip((-0.18, 0.18), pair, theme.colours, strict=False):
                axes.barh(place + offset, case["fraction"], 0.32, color=colour)
                text = f"{case['name']}: {case['us']:,.1f} us"
                axes.text(0.02, place + offset, text, va="center", color=theme.paper, weight="bold", fontsize=8.5)
        if not pairs:
            axes.text(0.5, 0.5, "no suite that has both was run whole", ha="center", transform=axes.transAxes)
        axes.set(yticks=[], xlim=(0, 1.02), xlabel="fraction of the floor", title="Unequal lengths, above equal ones")
        axes.invert_yaxis()
    return figure


def plot_roofline(results: Mapping[str, data.Results], theme: Theme = LIGHT) -> Any:
    """Returns a Figure of each case's TFLOP/s against its flops a byte, under the measured ceilings.

    Args:
      results: from `series.load_results`.
      theme: the page's colours.

    Raises:
      ImportError: without matplotlib.
    """
    with _themed(theme, 7.2, 4.4) as figure:
        axes = figure.add_subplot()
        ceilings = next(iter(results.values()))["ceilings"] if results else None
        if ceilings:
            _draw_ceilings(axes, ceilings, theme)
        kinds: dict[str, list[Mapping[str, Any]]] = {}
        for case in data.all_cases(results):
            kinds.setdefault(_kind(case["name"]), []).append(case)
        for (kind, cases), colour, marker in zip(kinds.items(), theme.colours, _MARKERS, strict=False):
            x = [case["flops"] / case["bytes"] for case in cases]
            y = [case["flops"] / case["us"] / 1e6 for case in cases]
            axes.scatter(x, y, color=colour, marker=marker, s=30, label=kind, zorder=3, edgecolors=theme.paper, lw=0.5)
        axes.set(xscale="log", yscale="log", xlabel="flops a byte that must move", ylabel="TFLOP/s", title="Roofline")
        axes.legend(frameon=False, labelcolor=theme.ink)
    return figure


def _draw_ceilings(axes: Any, ceilings: Mapping[str, Any], theme: Theme) -> None:
    last = ceilings["read"][-1]
    rate, peak = last["bytes"] / last["us"] / 1e6, ceilings["matmul_tflops"]  # TB/s, TFLOP/s
    x = np.geomspace(2, 2000, 100)
    axes.plot(x, np.minimum(rate * x, peak), color=theme.ink, lw=1.2)
    axes.text(2.2, rate * 2.2 * 1.7, f"reads {rate:.2f} TB/s", color=theme.ink, rotation=38, fontsize=8.5)
    axes.text(2000, peak * 1.12, f"multiplies {peak:,.0f} TFLOP/s", color=theme.ink, ha="right", fontsize=8.5)


def _kind(name: str) -> str:
    first = name.split("_")[0]
    words = {"pre": "prefill", "var8": "prefill", "even8": "prefill", "chunk": "chunked prefill", "mix": "mixed batch"}
    return words.get(first, "multi-token decode" if first == "mtp4" else "decode")


_RATIOS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)  # ticks


def plot_peers(results: data.Results, theme: Theme = LIGHT) -> Any:
    """Returns a Figure of how long peers take on each case of a suite, in times of ours; hollow: without rests.

    Args:
      results: of one suite.
      theme: the page's colours.

    Raises:
      ImportError: without matplotlib.
    """
    cases = [case for case in results["cases"] if case["us"] is not None and case["peers"]]
    peers = list(dict.fromkeys(name for case in cases for name in case["peers"]))
    with _themed(theme, 8, 1.6 + 0.27 * len(cases)) as figure:
        axes = figure.add_subplot()
        for index, name in enumerate(peers):
            points = [(case["peers"][name] / case["us"], i) for i, case in enumerate(cases) if name in case["peers"]]
            colour, marker = theme.colours[index % len(theme.colours)], _MARKERS[index // len(theme.colours)]
            axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=36, label=name, zorder=3)
            busy = [(ratio, i) for i, case in enumerate(cases) if (ratio := _busy_ratio(case, name)) is not None]
            if busy:
                style = {"facecolors": "none", "edgecolors": colour, "marker": marker}
                axes.scatter(*zip(*busy, strict=True), s=36, zorder=3, **style)
        axes.axvline(1, color=theme.ink, lw=1.2)
        axes.set_yticks(range(len(cases)), [case["name"] for case in cases])
        axes.set_xlabel("time of the peer / time of inkling_pallas (right of the line: the peer is slower)")
        axes.set_title(f"Peers ({results['meta']['suite']}); names in _nobias leave the bias out")
        axes.grid(axis="y", color=theme.faint, lw=0.6)
        axes.invert_yaxis()
        ratios = [us / case["us"] for case in cases for us in case["peers"].values()]
        if max(ratios) > 4 * min(ratios):
            axes.set_xscale("log")
            axes.set_xticks([x for x in _RATIOS if min(ratios) / 1.5 <= x <= max(ratios) * 1.5], minor=False)
            axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:g}")
        if any(busy_times(case) for case in cases):
            axes.scatter([], [], facecolors="none", edgecolors=theme.ink, s=36, label="hollow: without rests")
        axes.legend(frameon=False, labelcolor=theme.ink, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _busy_ratio(case: Mapping[str, Any], name: str) -> float | None:
    busy = busy_times(case)
    return busy[name] / busy[OURS] if {name, OURS} <= set(busy) else None


def save_svg(figure: Any, path: Path) -> None:
    """Writes a figure, with the same bytes for the same figure."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "inkling_pallas"}):
        figure.savefig(path, metadata={"Date": None})


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else f"{count}"


def _row(figure: Any, count: int) -> Sequence[Any]:
    return np.ravel(figure.subplots(1, count)).tolist() if count else []


@contextlib.contextmanager
def _themed(theme: Theme, width: float, height: float) -> Iterator[Any]:
    keys = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    style = dict.fromkeys(keys, theme.ink) | {"axes.facecolor": theme.paper}
    with new_figure(width, height, style=style, paper=theme.paper) as figure:
        yield figure
