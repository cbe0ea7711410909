"""What commands share: a progress bar and a table on the terminal, and an option that is a count.

Bars and tables are rich's where it is installed, else plain lines.

Progress is told in lines, too, where stdout is no terminal: a log shows what a bar would not.
"""

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence

_HAS_RICH = importlib.util.find_spec("rich") is not None


def _draws_bars() -> bool:
    return _HAS_RICH and sys.stdout.isatty()


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with a label before each of `total` steps."""
    if _draws_bars():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns) as bar:
            task = bar.add_task(title, total=total)
            started = False

            def step(label: str) -> None:
                nonlocal started
                bar.update(task, description=f"{title}: {label}", advance=int(started))
                started = True

            yield step
            bar.update(task, description=title, completed=total)
        return
    count = iter(range(1, total + 1))
    yield lambda label: print(f"{title} {next(count, total)}/{total}: {label}", flush=True)


@contextlib.contextmanager
def meter(title: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Yields a function to call with how much of `total` is done and a label, as often as there is news."""
    if _draws_bars():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done, label: bar.update(task, completed=done, description=f"{title}: {label}")
        return
    shown = -1

    def show(done: int, label: str) -> None:
        nonlocal shown
        if done > shown:
            shown = done
            print(f"{title} {done}/{total}: {label}", flush=True)

    yield show


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; every column but the first is aligned right."""
    if _HAS_RICH:
        from rich.console import Console
        from rich.table import Table

        grid = Table(title=title, title_justify="left")
        for index, column in enumerate(columns):
            grid.add_column(column, justify="right" if index else "left", overflow="fold")
        for row in rows:
            grid.add_row(*row)
        Console(width=None if Console().is_terminal else 160).print(grid)
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    print(title)
    for row in (columns, *rows):
        print(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )


def positive(text: str) -> int:
    """Returns the integer >= 1 that an option holds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1; got {text!r}")
    return int(text)
