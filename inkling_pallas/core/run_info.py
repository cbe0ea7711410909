"""What must be known to read a result: the card, the software, the command; and writing it to a file."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax


def card_name() -> str:
    """Returns the default device's name as file names have it: 'nvidia-h200', 'cpu'."""
    return re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")


def describe_run(suite: str, command: str, timer: str) -> dict[str, Any]:
    """Returns the `meta` of a results file."""
    return {
        "suite": suite,
        "card": card_name(),
        "driver": _driver_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "timer": timer,
    }


def _driver_version() -> str | None:
    """Returns the NVIDIA driver's version, or None without a card."""
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None or jax.default_backend() != "gpu":
        return None
    command = [nvidia_smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.split("\n")[0].strip() or None


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Replaces the file at once, so that whoever reads it meanwhile never sees half of it."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(draft, path)
