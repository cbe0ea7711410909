"""What a soak has judged so far, in memory and in a file that a later run goes on from."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import jax

import inkling_pallas.core.run_info as run_info
from inkling_pallas.core.errors import refuse
from inkling_pallas.testing.soak import Report, Soak

# Wrong batches of a shape that are kept one by one; all are counted.
_KEPT = 20


@dataclasses.dataclass(kw_only=True)
class Tally:
    """The batches of a shape that were judged, always the first ones of the run."""

    done: int = 0
    wrong: int = 0
    worst: float = 0.0
    batches: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    refused: str = ""
    failed: str = ""

    def add(self, report: Report) -> None:
        """Counts a report."""
        self.done += report.done
        self.wrong += len(report.wrong)
        self.worst = max(self.worst, report.worst)
        self.batches += report.wrong[: max(0, _KEPT - len(self.batches))]
        self.refused, self.failed = report.refused, report.failed


def source_digest() -> str:
    """Returns what tells this source of the package from any other."""
    package = Path(run_info.__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def identity_of(soak: Soak) -> dict[str, Any]:
    """Returns what two runs must share for one to go on from the other."""
    facts = dataclasses.asdict(soak)
    del facts["random"]
    return {**facts, "version": source_digest(), "jax": jax.__version__}


def record_path(folder: Path, soak: Soak) -> Path:
    """Returns the file of a run."""
    forms = "".join(f"-{form}" for form in (soak.layout, soak.bias) if form not in ("separate", "plain"))
    partial = "-partial" if soak.kind else ""
    return folder / f"{run_info.card_name()}-check-{soak.backend}{forms}-random{partial}.json"


def read_record(path: Path | None, soak: Soak) -> dict[str, Tally]:
    """Returns the tally of each shape of a run, from a file of it if there is one.

    Raises:
      ValueError: where the file is of another run, or no such file.
    """
    tallies = {shape.name: Tally() for shape in soak.shapes()}
    if path is None or not path.exists():
        return tallies
    advice = "Name another folder, or remove the file."
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        run, random = dict(written["run"]), int(written["random"])
        found = {name: _tally(facts) for name, facts in written["shapes"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refuse("--out", "hold a file of `check --random`", f"{path} ({type(error).__name__})", advice) from None
    for name, value in identity_of(soak).items():
        if run.get(name) != value:
            raise refuse("--out", f"hold a run of {name} {value!r}", f"{run.get(name)!r} in {path}", advice)
    if random > soak.random:
        raise refuse("--random", f"be at least {random}, as {path} has", soak.random, advice)
    return tallies | {name: tally for name, tally in found.items() if name in tallies}


def _tally(facts: dict[str, Any]) -> Tally:
    tally = Tally(**facts)
    return dataclasses.replace(tally, worst=float(tally.worst), refused="", failed="")


def write_record(path: Path, soak: Soak, tallies: dict[str, Tally], command: str) -> None:
    """Writes the file."""
    shapes = {name: dataclasses.asdict(tally) for name, tally in tallies.items()}
    for facts in shapes.values():
        facts["worst"] = facts["worst"] if math.isfinite(facts["worst"]) else str(facts["worst"])
    meta = run_info.describe_run("check", command, "none")
    run_info.write_json(path, {"meta": meta, "run": identity_of(soak), "random": soak.random, "shapes": shapes})
