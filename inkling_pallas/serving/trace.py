"""Request lengths from a CSV file of a serving trace."""

import csv
import dataclasses
from importlib import resources
from pathlib import Path

COLUMNS = ("ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A trace that cannot be read; the message says where and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Lengths of one request, in tokens."""

    context: int
    generated: int


def shipped_trace() -> Path:
    """Returns the path of the small hand-written trace that comes with the package."""
    return Path(str(resources.files("inkling_pallas.serving") / "data" / "requests.csv"))


def read_trace(path: Path | None = None) -> tuple[Request, ...]:
    """Returns the requests of a trace, in order.

    Args:
      path: CSV file with the columns ContextTokens and GeneratedTokens (others are left alone); None reads the shipped
        one.

    Raises:
      TraceError: if the file is missing, has no such columns, no rows, or a length that is no integer >= 1 (context) or
        >= 0 (generated).
    """
    path = shipped_trace() if path is None else path
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"{path}: no column {missing[0]!r} in its first line; it needs {', '.join(COLUMNS)}.")
            requests = tuple(_request(path, reader.line_num, row) for row in reader)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not a CSV text file ({error}).") from error
    if not requests:
        raise TraceError(f"{path}: no requests after its first line.")
    return requests


def _request(path: Path, line: int, row: dict[str, str]) -> Request:
    lengths = []
    for name, least in zip(COLUMNS, (1, 0), strict=True):
        text = row[name]
        value = int(text) if text is not None and text.strip().isdecimal() else -1
        if not least <= value < 2**24:
            raise TraceError(
                f"{path}, line {line}: {name} must be an integer from {least} to {2**24 - 1}; got {text!r}."
            )
        lengths.append(value)
    return Request(context=lengths[0], generated=lengths[1])
