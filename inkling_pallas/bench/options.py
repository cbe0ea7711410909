"""The command line of `bench`, checked."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inkling_pallas.bench.peers import ALL_PEERS
from inkling_pallas.bench.workloads import SUITES
from inkling_pallas.core.dispatch import BACKENDS
from inkling_pallas.core.errors import refuse
from inkling_pallas.core.run_info import card_name

# Past so many seconds no case is started, so that a suite ends within 8 minutes.
_TIME_LIMIT = 420.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A checked command line: two files to compare, or a suite to run."""

    compare: tuple[Path, Path] | None = None
    suite: str = ""
    cases: tuple[str, ...] = ()
    backend: str = "auto"
    peers: tuple[str, ...] = ()
    busy: bool = True
    time_limit: float = _TIME_LIMIT
    path: Path = Path()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"{message}. See `python -m inkling_pallas bench --help`.")


def parse_options(argv: Sequence[str]) -> Options:
    """Returns the options, or raises ValueError with what is wrong."""
    given = _parser().parse_args(argv)
    if given.compare is not None:
        first, second = map(_file, given.compare)
        return Options(compare=(first, second))
    suite = _known("--suite", [given.suite], SUITES)[0]
    backend = _known("--backend", [given.backend], ("auto", *BACKENDS))[0]
    cases = SUITES[suite] if given.cases is None else _known("--cases", given.cases.split(","), SUITES[suite])
    peers = ALL_PEERS
    if given.peers is not None:
        peers = () if given.peers == "none" else _known("--peers", given.peers.split(","), ALL_PEERS)
    if not given.time_limit > 0:
        raise refuse("--time-limit", "be a positive number of seconds", given.time_limit, "Cases past it are skipped.")
    name = f"{card_name()}-{suite}{'' if given.cases is None else '-partial'}.json"
    path = _folder(given.out) / name
    return Options(
        suite=suite,
        cases=cases,
        backend=backend,
        peers=peers,
        busy=not given.no_busy,
        time_limit=given.time_limit,
        path=path,
    )


def _parser() -> _Parser:
    parser = _Parser(prog="python -m inkling_pallas bench", description="Time the operator against ceilings and peers.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--suite", help=f"one of {', '.join(SUITES)}")
    what.add_argument("--compare", nargs=2, metavar=("A.json", "B.json"), help="compare two results files, run nothing")
    parser.add_argument(
        "--cases", help="comma-separated, of the suite; the file's name then ends in -partial (default: all)"
    )
    parser.add_argument("--backend", default="auto", help=f"auto or one of {', '.join(BACKENDS)} (default: auto)")
    parser.add_argument("--peers", help=f"comma-separated, or none (default: {','.join(ALL_PEERS)})")
    parser.add_argument(
        "--no-busy",
        action="store_true",
        help="leave out calls without rests and their energy: about 5 s for each case and peer",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=_TIME_LIMIT,
        metavar="SECONDS",
        help="past it no case is started (default: %(default)s)",
    )
    parser.add_argument("--out", default="notebooks/results", help="folder of the JSON file (default: %(default)s)")
    return parser


def _known(argument: str, names: Sequence[str], known: Sequence[str] | Mapping[str, Any]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise refuse(argument, f"be among {', '.join(known)}", repr(name), "Check the spelling.")
    return tuple(dict.fromkeys(names))


def _file(given: str) -> Path:
    if not Path(given).is_file():
        raise refuse("--compare", "name two results files", repr(given), "There is no such file.")
    return Path(given)


def _folder(given: str) -> Path:
    path = Path(given)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refuse("--out", "be a folder that can be written to", repr(given), f"{error.strerror}.") from None
    return path
