"""What holds for every test: strict jax, no compile cache, reproducible hypothesis, and markers.

Without a card most tests compile programs that they run once, so XLA optimizes only where a marker asks for it.
"""

import os
import shutil
import subprocess
from typing import Any

# The oracle has threads of its own; BLAS threads beside them spin. Set before NumPy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The interpreter runs each warp of a kernel on a thread, and one that waits keeps a thread of XLA's pool: on few cores
# all of them may wait, and what they wait for never runs. XLA reads this as the number of cores.
if int(os.environ.get("NPROC", os.cpu_count() or 1)) < 16:
    os.environ["NPROC"] = "16"

import jax
import pytest
from hypothesis import settings


def _has_card() -> bool:
    nvidia_smi = shutil.which("nvidia-smi")
    return nvidia_smi is not None and subprocess.run([nvidia_smi, "-L"], capture_output=True).returncode == 0


# A CUDA plugin without a card is there to compile, not to run. The environment is set for tests that start a process.
_HAS_CARD = _has_card()
if not _HAS_CARD:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # xdist's workers share the card's memory.

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)

# Compiling takes longer than any deadline; CI draws the same examples every time, other machines look for new ones.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


_OPTIMIZED = ("optimized", "interpreter", "lowering", "gpu")


def pytest_configure(config: pytest.Config) -> None:
    if _HAS_CARD:  # where portable is meant for a CPU alone, it says so
        config.addinivalue_line("filterwarnings", "ignore:inkling_rel_attention takes the portable backend on a GPU")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU; jax runs on {jax.default_backend()} here")
    _let_xla_optimize(_HAS_CARD or any(map(item.get_closest_marker, _OPTIMIZED)))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuses a test that `make test` would run on neither jax: `small` ones run on the second, these do not."""
    other = {"full", "interpreter", "host"} & {mark.name for mark in item.iter_markers()}
    if item.get_closest_marker("small") and other:
        raise pytest.UsageError(f"{item.nodeid} is marked small and {', '.join(other)}: no jax would run it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts what XLA optimizes first: each change drops all that was compiled."""
    items.sort(key=lambda item: not any(map(item.get_closest_marker, _OPTIMIZED)))


def _let_xla_optimize(wanted: bool) -> None:
    """Sets it for what is compiled from now on: jit does not look at it, so what was compiled otherwise goes."""
    if jax.config.read("jax_disable_most_optimizations") == wanted:
        jax.config.update("jax_disable_most_optimizations", not wanted)
        jax.clear_caches()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what tests recorded, which is worth reading where all is green, too."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
