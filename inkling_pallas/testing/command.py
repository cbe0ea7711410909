"""`python -m inkling_pallas check`: every backend of this machine on the cases that it must pass."""

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from inkling_pallas.core.cache_layouts import LAYOUTS
from inkling_pallas.core.console import progress, table
from inkling_pallas.core.devices import device_capability
from inkling_pallas.core.dispatch import BACKENDS, INTERPRETER_THREADS, machine_backends
from inkling_pallas.core.run_info import card_name, describe_run, write_json
from inkling_pallas.testing import soak_command
from inkling_pallas.testing.cache_cases import in_layout
from inkling_pallas.testing.catalog import full_cases, kinds, small_cases
from inkling_pallas.testing.judge import OPERATORS, Operator, Verdict, interpreted, judge
from inkling_pallas.testing.promises import CONTRACT_CHECKS, ContractError

_COLUMNS = ("case", "kind", "row error", "limit", "margin", "lse", "alone", "verdict")


def parser() -> argparse.ArgumentParser:
    """Returns the command line of `check`."""
    p = argparse.ArgumentParser(prog="python -m inkling_pallas check", description=__doc__)
    p.add_argument(
        "--full", action="store_true", help="every case (minutes on a CPU) instead of a short form of each kind"
    )
    p.add_argument("--kind", help="only cases of this kind, for example 'decode'")
    p.add_argument("--backend", help="only this backend; without a card for it, in the Pallas interpreter")
    p.add_argument(
        "--layout", choices=LAYOUTS, default="separate", help="of the caches; write_kv cases come in every layout"
    )
    p.add_argument(
        "--bias", choices=OPERATORS, default="plain", help="layout of the bias; sheared leaves out the promises"
    )
    p.add_argument("--out", type=Path, help="folder for the verdicts as JSON, one file per backend")
    p.add_argument("--quiet", action="store_true", help="list only cases that are red or refused")
    soak_command.add_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Runs the check; returns 0 when nothing is red, 1 when something is, 2 for a bad option."""
    options = parser().parse_args(argv)
    if options.backend:  # If it is to be interpreted, each warp takes a thread: XLA reads this as the number of cores.
        os.environ["NPROC"] = str(max(INTERPRETER_THREADS, os.cpu_count() or 1))
    if soak_command.asked_for(options):
        return soak_command.main(options, argv)
    cases = full_cases(on_card=device_capability() is not None) if options.full else small_cases()
    cases = in_layout(cases, options.layout)
    known = (*kinds(cases), *CONTRACT_CHECKS)
    if options.kind and options.kind not in known:
        print(f"check: --kind must be one of {', '.join(known)}; got {options.kind!r}.")
        return 2
    backends = machine_backends()
    if options.backend and options.backend not in BACKENDS:
        print(f"check: --backend must be one of {', '.join(BACKENDS)}; got {options.backend!r}.")
        return 2
    operator, promises = OPERATORS[options.bias], CONTRACT_CHECKS if options.bias == "plain" else {}
    if options.backend and options.backend not in backends:
        print(
            f"check: no card for {options.backend} here; the Pallas interpreter runs its small cases, without promises."
        )
        operator, promises, cases = interpreted(operator), {}, in_layout(small_cases(), options.layout)
    cases = [case for case in cases if options.kind in (None, case.kind)]
    contract = {kind: run for kind, run in promises.items() if options.kind in (None, kind)}
    red = 0
    for backend in [options.backend] if options.backend else backends:
        with progress(f"check {backend}", len(cases) + len(contract)) as step:
            rows = [_case_row(case, backend, operator, step) for case in cases]
            rows += [_contract_row(kind, run, backend, step) for kind, run in contract.items()]
        shown = [row for row in rows if not options.quiet or row[-1] != "ok"]
        if shown:
            table(f"{backend} on {jax.devices()[0].device_kind}, jax {jax.__version__}", _COLUMNS, shown)
        red += _summary(backend, [row[-1] for row in rows])
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            forms = "".join(f"-{form}" for form in (options.layout, options.bias) if form not in ("separate", "plain"))
            name = f"{card_name()}-check-{backend}{forms}{'-partial' if options.kind else ''}.json"
            write_json(options.out / name, verdicts_as_json(rows, shlex.join(argv)))
    return 1 if red else 0


def verdicts_as_json(rows: Sequence[tuple[str, ...]], options: str) -> dict[str, Any]:
    """Returns the rows of the table with what must be known to read them."""
    meta = describe_run("check", f"python -m inkling_pallas check {options}".strip(), "none")
    return {"meta": meta, "cases": [dict(zip(_COLUMNS, row, strict=True)) for row in rows]}


def _summary(backend: str, verdicts: Sequence[str]) -> int:
    """Prints the counts and returns how many are red."""
    red = sum(verdict.startswith("RED") for verdict in verdicts)
    refused = sum(verdict.startswith("refused") for verdict in verdicts)
    print(f"{backend}: {len(verdicts) - red - refused} ok, {red} red, {refused} refused (portable takes those).")
    return red


def _case_row(case, backend: str, operator: Operator, step: Callable[[str], None]) -> tuple[str, ...]:
    step(case.name)
    try:
        verdict = judge(case, operator, backend=backend)
    except NotImplementedError as error:
        return (case.name, case.kind, *["-"] * 5, f"refused: {error}")
    return _cells(verdict)


def _cells(verdict: Verdict) -> tuple[str, ...]:
    numbers = (verdict.row_error, verdict.limit, verdict.margin, verdict.lse_error, verdict.alone_error)
    formats = ("{:.2e}", "{:.2e}", "{:.1f} x", "{:.3f}", "{:.2e}")
    cells = (text.format(number) for text, number in zip(formats, numbers, strict=True))
    return (verdict.case.name, verdict.case.kind, *cells, f"RED: {verdict.failure}" if verdict.red else "ok")


def _contract_row(kind: str, run: Callable[[str], None], backend: str, step: Callable[[str], None]) -> tuple[str, ...]:
    step(kind)
    try:
        run(backend)
    except NotImplementedError as error:
        verdict = f"refused: {error}"
    except ContractError as error:
        verdict = f"RED: {error}"
    else:
        verdict = "ok"
    return (kind, kind, *["-"] * 5, verdict)
