"""What a user installs: the contents and metadata of the wheel, and an import that needs no extra."""

import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import inkling_pallas

pytestmark = pytest.mark.host

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"inkling_pallas-{PROJECT['version']}.dist-info/METADATA").decode())


def test_wheel_holds_the_whole_package_and_nothing_else(wheel):
    source = (path for path in (ROOT / "inkling_pallas").rglob("*") if path.is_file() and path.suffix != ".pyc")
    expected = {path.relative_to(ROOT).as_posix() for path in source}
    assert {"inkling_pallas/py.typed", "inkling_pallas/__init__.py"} <= expected
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_wheel_carries_the_licence(wheel):
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"
    licence = wheel.read(f"inkling_pallas-{PROJECT['version']}.dist-info/licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()


def test_only_jax_and_numpy_are_needed_at_run_time(wheel):
    requirements = metadata(wheel).get_all("Requires-Dist", [])
    assert sorted(line for line in requirements if "extra ==" not in line) == ["jax<0.13,>=0.11.2", "numpy>=2.0"]
    assert metadata(wheel)["Requires-Python"] == ">=3.12"


def test_version_is_told_once():
    assert inkling_pallas.__version__ == PROJECT["version"]


def test_import_needs_no_extra():
    """Every module imports with the packages of the extras hidden: they may be asked for only where they are used."""
    hidden = ["chex", "flatbuffers", "hypothesis", "jax_triton", "matplotlib", "pytest", "rich", "torch", "triton"]
    program = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({hidden}))
import inkling_pallas
for module in pkgutil.walk_packages(inkling_pallas.__path__, "inkling_pallas."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
