"""Writes README's tables and plots from results files: `python -m inkling_pallas report`."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inkling_pallas.bench import plots
from inkling_pallas.bench.series import Results, load_results, markdown_table, provenance, skew_pairs
from inkling_pallas.core.errors import refuse

_BEGIN, _END = "<!-- results: written by `python -m inkling_pallas report` -->", "<!-- end of results -->"
_SUITES = {"decode": "Decode", "prefill": "Prefill", "mixed": "Mixed batches"}
_ALTERNATIVES = {
    "costs": "time against keys, sequences and rows",
    "skew": "unequal lengths beside equal ones",
    "roofline": "roofline",
    "peers-decode": "peers at decode",
    "peers-prefill": "peers at prefill",
    "peers-mixed": "peers at mixed batches",
    "peers-local": "peers in local layers, some with the bias",
}


def main(argv: Sequence[str]) -> int:
    """Runs `report`; returns 0, or 2 for a wrong argument, which is named in one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m inkling_pallas report", description=__doc__)
    parser.add_argument("--results", default="notebooks/results", help="folder of JSON files (default: %(default)s)")
    parser.add_argument("--readme", default="README.md", help="file to write tables into (default: %(default)s)")
    parser.add_argument("--plots", default="docs/plots", help="folder of the plots (default: %(default)s)")
    given = parser.parse_args(argv)
    try:
        write_report(Path(given.results), Path(given.readme), Path(given.plots))
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def write_report(folder: Path, readme: Path, plot_folder: Path) -> None:
    """Writes the plots, then README's tables.

    Raises:
      OSError: if a file cannot be read or written.
      ValueError: without results, or if README has no place for them.
    """
    results = load_results(folder)
    if not results:
        raise refuse("--results", "hold files that `bench` wrote for whole suites", repr(str(folder)), "Run one.")
    text = with_tables(readme.read_text(encoding="utf-8"), results, str(plot_folder.as_posix()))
    plot_folder.mkdir(parents=True, exist_ok=True)
    for name, draw in figures(results).items():
        for theme_name, theme in {"light": plots.LIGHT, "dark": plots.DARK}.items():
            plots.save_svg(draw(theme), plot_folder / f"{name}-{theme_name}.svg")
    readme.write_text(text, encoding="utf-8")


def figures(results: Mapping[str, Results]) -> dict[str, Callable[[plots.Theme], Any]]:
    """Returns what draws each plot for which there are results, by its file's name."""
    drawn: dict[str, Callable[[plots.Theme], Any]] = {"costs": lambda theme: plots.plot_costs(results, theme)}
    if skew_pairs(results):
        drawn["skew"] = lambda theme: plots.plot_skew(results, theme)
    drawn["roofline"] = lambda theme: plots.plot_roofline(results, theme)
    for suite in (*_SUITES, "local"):
        if suite in results and any(case["peers"] for case in results[suite]["cases"]):
            drawn[f"peers-{suite}"] = lambda theme, suite=suite: plots.plot_peers(results[suite], theme)
    return drawn


def with_tables(text: str, results: Mapping[str, Results], plot_folder: str) -> str:
    """Returns README's text with the part between its two marks made from results.

    Raises:
      ValueError: if the marks are missing.
    """
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise refuse("--readme", f"hold the lines {_BEGIN!r} and {_END!r} once", "neither or more", "Add them.")
    parts = [
        f"**{title}.** {provenance(results[suite])}\n\n{markdown_table(results[suite])}"
        for suite, title in _SUITES.items()
        if suite in results
    ]
    parts += [_picture(plot_folder, name) for name in figures(results)]
    body = "\n\n".join([_BEGIN, *parts, _END])
    return re.sub(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", lambda _: body, text, flags=re.DOTALL)


def _picture(folder: str, name: str) -> str:
    """Returns the HTML that shows a plot in the colours of the page."""
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.svg">'
    return f'<picture>{dark}<img src="{folder}/{name}-light.svg" alt="{_ALTERNATIVES[name]}"></picture>'
