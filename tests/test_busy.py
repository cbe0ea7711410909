"""Calls without rests: how many a loop makes, when they count, and what the driver's counters make of them."""

import collections
import re
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from inkling_pallas.bench import busy, energy
from inkling_pallas.bench.clocks import Rotation
from inkling_pallas.bench.energy import Reading


class NoMeter(energy.Meter):
    """Of a machine that tells nothing."""

    def __init__(self):
        self.missing = "not asked"


def counting(calls):
    """Returns a function that notes each run of it, which XLA may leave out or merge as it may a kernel."""

    def note(x):
        calls.append(int(x[0]))
        return x * 2

    return jax.jit(lambda x: jax.pure_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), x))


@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.optimized
def test_a_loop_makes_as_many_calls_as_it_has_turns(sets):
    calls: list[int] = []
    rotation = Rotation(counting(calls), [(np.full(4, i, np.int32),) for i in range(sets)])
    results = jax.block_until_ready(busy.compile_loop(rotation, turns=5)())
    assert sorted(calls) == sorted(list(range(sets)) * 5)
    assert [int(result[0]) for result in results] == [2 * i for i in range(sets)]


def kernels_of(call, folder):
    """Returns how often each kernel runs in a call; XLA numbers those of a name, differently in a loop."""
    jax.block_until_ready(call())
    with jax.profiler.trace(folder):
        jax.block_until_ready(call())
    profiles = [ProfileData.from_file(str(path)) for path in folder.rglob("*.xplane.pb")]
    planes = [plane for profile in profiles for plane in profile.planes if plane.name.startswith("/device:GPU")]
    lines = [line for plane in planes for line in plane.lines if line.name.startswith("Stream")]
    return collections.Counter(re.sub(r"(_\d+)+$", "", event.name) for line in lines for event in line.events)


@pytest.mark.gpu
def test_a_loop_runs_as_many_kernels_as_it_has_turns(tmp_path):
    inputs = [jnp.full((256, 256), float(i)) for i in range(3)]
    rotation = Rotation(jax.jit(lambda x: jnp.tanh(x @ x)), [(x,) for x in inputs])
    one = kernels_of(lambda: rotation(0), tmp_path / "call")
    loop = kernels_of(busy.compile_loop(rotation, 20), tmp_path / "loop")
    assert one
    assert {name: loop[name] for name in one} == {name: 20 * 3 * count for name, count in one.items()}
    assert sum(loop.values()) <= 20 * (3 * sum(one.values()) + 1) + 8  # a turn is counted, and the loop begun


def test_a_loop_without_turns_is_refused():
    with pytest.raises(ValueError, match="turns must be at least 1; got 0"):
        busy.compile_loop(Rotation(jnp.negative, [(jnp.ones(2),)]), turns=0)


def test_a_call_of_two_milliseconds_takes_two_milliseconds(monkeypatch):
    monkeypatch.setattr(busy, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(busy, "SECONDS", 0.2)
    monkeypatch.setattr(busy, "_LOOP_SECONDS", 0.02)
    waits: list[float] = [0.0]

    def run(turns):  # a device that takes 2 ms a turn, one loop behind the other
        waits[0] = max(waits[0], time.perf_counter()) + 2e-3 * turns
        return lambda end=waits[0]: time.sleep(max(0.0, end - time.perf_counter()))

    measured = busy.time_loops(run, 1, NoMeter(), rested_us=1500.0)
    assert measured.us == pytest.approx(2000.0, rel=0.3)
    assert (measured.mhz, measured.watts, measured.mj) == (None, None, None)


def test_calls_count_once_the_chip_has_settled():
    readings = [Reading(0.1 * i, 500_000 if i < 5 else 70_000 * (i // 2), 1700 if i < 6 else 1600) for i in range(31)]
    measured = busy._summarise([0.0, 0.2, 0.6, 1.6, 2.6], 1000, readings)
    assert measured.us == pytest.approx(1000.0)
    assert measured.mhz == 1600
    assert measured.watts == pytest.approx(350.0)
    assert measured.mj == pytest.approx(350.0)
    assert busy.Busy(us=1234.5678, mhz=None, watts=350.04, mj=0.0123456).rounded() == {
        "us": 1234.6,
        "mhz": None,
        "watts": 350.04,
        "mj": 0.012346,
    }


def test_power_is_the_slope_between_steps_of_the_counter():
    counter = [0, 0, 10_000, 10_000, 10_000, 30_000, 30_000]  # at each tenth of a second
    readings = [Reading(0.1 * i, mj, 0) for i, mj in enumerate(counter)]
    assert energy.watts_of(readings, 0.0, 1.0) == pytest.approx(20_000 / 0.3 / 1e3)
    assert energy.watts_of(readings, 0.15, 1.0) is None  # one step tells no slope
    assert energy.mhz_of(readings, 2.0, 3.0) is None


def fake_nvml(**changes):
    class Error(Exception):
        pass

    def refuse(_):
        raise Error("Not Supported")

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda number: f"card {number}",
        "nvmlDeviceGetHandleByUUID": lambda name: f"card {name}",
        "nvmlDeviceGetTotalEnergyConsumption": lambda card: 5000,
        "nvmlDeviceGetClockInfo": lambda card, which: 1800,
        "NVML_CLOCK_SM": 1,
    }
    return types.SimpleNamespace(**functions | {name: refuse for name, there in changes.items() if not there})


def test_a_meter_reads_while_calls_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    meter = energy.Meter()
    assert meter.missing is None
    with meter.watching() as readings:
        deadline = time.monotonic() + 10
        while len(readings) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    count = len(readings)
    assert count >= 2
    assert set(readings) == {Reading(reading.seconds, 5000, 1800) for reading in readings}
    time.sleep(0.02)
    assert len(readings) == count  # it has ended


@pytest.mark.parametrize(
    ("visible", "card"), [("", "card 0"), ("3,1", "card 3"), ("GPU-8a,1", "card GPU-8a"), (" 2 ", "card 2")]
)
def test_the_meter_reads_the_card_that_is_used(visible, card):
    assert energy._card(fake_nvml(), visible) == card


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "nvidia-ml-py is not installed: `pip install nvidia-ml-py`"),
        (fake_nvml(nvmlDeviceGetTotalEnergyConsumption=False), "the driver tells no energy (Error: Not Supported)"),
        (fake_nvml(nvmlInit=False), "the driver tells no energy ("),
    ],
)
def test_a_meter_without_counters_says_why_and_reads_nothing(monkeypatch, module, reason):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    meter = energy.Meter()
    assert str(meter.missing).startswith(reason)
    with meter.watching() as readings:
        pass
    assert readings == []
