"""What the driver of an NVIDIA card says of its energy and clock while calls run, by NVML.

The energy is that of the board's counter, which counts on every 20 to 100 ms: power is the slope between two of its
steps. The driver's own reading of power is an average of a second, and is not used.
"""

import contextlib
import importlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from inkling_pallas.core.errors import one_line

_PERIOD = 0.005  # seconds between two readings


class Reading(NamedTuple):
    """One look at a card."""

    seconds: float  # of `time.perf_counter`
    millijoules: int
    mhz: int  # of the SMs


class Meter:
    """Reads a card's counters; where there is nothing to read, `missing` says why in one line, else it is None."""

    def __init__(self) -> None:
        self.missing: str | None = None
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._card = _card(self._nvml, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            self._read()
        except ImportError:
            self.missing = "nvidia-ml-py is not installed: `pip install nvidia-ml-py`"
        except Exception as error:  # NVML has an error of its own for each thing that a card or a driver lacks
            self.missing = f"the driver tells no energy ({one_line(error)})"

    def _read(self) -> Reading:
        energy = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card)
        clock = self._nvml.nvmlDeviceGetClockInfo(self._card, self._nvml.NVML_CLOCK_SM)
        return Reading(time.perf_counter(), energy, clock)

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Reading]]:
        """Reads on and on during a block, in a thread; the list fills meanwhile, and stays empty where nothing is."""
        readings: list[Reading] = []
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_PERIOD):
                readings.append(self._read())

        if self.missing is not None:
            yield readings
            return
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield readings
        finally:
            ended.set()
            thread.join()


def _card(nvml: Any, visible: str) -> Any:
    """Returns NVML's handle of jax's default device, which counts among the devices that CUDA may see."""
    number = jax.devices()[0].local_hardware_id or 0 if jax.default_backend() == "gpu" else 0
    names = [name.strip() for name in visible.split(",") if name.strip()]
    name = names[number] if number < len(names) else str(number)
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def watts_of(readings: Sequence[Reading], begin: float, end: float) -> float | None:
    """Returns the mean power between the first and the last step of the counter in a span of time.

    None where it made fewer than two steps.
    """
    steps = [
        after
        for before, after in itertools.pairwise(readings)
        if begin <= before.seconds and after.seconds <= end and after.millijoules != before.millijoules
    ]
    if len(steps) < 2:
        return None
    return (steps[-1].millijoules - steps[0].millijoules) / (steps[-1].seconds - steps[0].seconds) / 1e3


def mhz_of(readings: Sequence[Reading], begin: float, end: float) -> float | None:
    """Returns the mean clock of the SMs in a span of time; None where nothing was read."""
    clocks = [reading.mhz for reading in readings if begin <= reading.seconds <= end]
    return sum(clocks) / len(clocks) if clocks else None
