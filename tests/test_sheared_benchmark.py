"""The suite `sheared` of the benchmark: what it measures, and what it calls wrong."""

import json

import jax.numpy as jnp
import pytest
from tiny_benchmark import FIXED, TINY

from inkling_pallas.bench import clocks, command, sheared, workloads
from inkling_pallas.relative_bias import sheared_relative_logits

pytestmark = pytest.mark.host


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(clocks, "MAX_CALLS", 3)
    monkeypatch.setattr(command, "measure_ceilings", lambda clock: FIXED)
    monkeypatch.setattr(command, "WORKLOADS", {**workloads.WORKLOADS, "pre_g_8k": TINY})


def run(folder):
    arguments = ["--suite", "sheared", "--cases", "pre_g_8k", "--peers", "none", "--out", str(folder)]
    status = command.main(arguments)
    return status, json.loads((folder / "cpu-sheared-partial.json").read_text())["cases"][0]


@pytest.mark.slow
def test_both_ways_are_timed_and_written(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "run_case", lambda case, *_: {**_timed(), "name": "pre_g_8k"})
    status, case = run(tmp_path)
    assert status == 0
    measured = case["sheared"]
    assert measured["reason"] is None
    assert measured["differs"]["shear"] == 0
    names = "copy einsum shear project attend_plain attend_sheared plain_from_r sheared_from_r"
    assert list(measured["calls"]) == names.split()
    project, copy = measured["calls"]["project"], measured["calls"]["copy"]
    assert project["bytes"] == 8 * 4 * 2 * (16 + 24)
    assert project["over_floor"] == pytest.approx(
        project["us"] / copy["us"] * copy["bytes"] / project["bytes"], rel=1e-2
    )
    assert "sheared_from_r" in capsys.readouterr().out


@pytest.mark.slow
def test_a_producer_that_is_wrong_is_red_and_not_timed(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "run_case", lambda case, *_: {**_timed(), "name": "pre_g_8k"})

    def shifted(r, proj, **lengths):
        return sheared_relative_logits(r, jnp.roll(proj, 1, axis=1), **lengths)

    monkeypatch.setattr(sheared, "sheared_relative_logits", shifted)
    status, case = run(tmp_path)
    assert status == 1
    assert case["red"]
    assert "further than a rounding" in case["sheared"]["reason"]
    assert case["sheared"]["calls"] == {}


def _timed():
    """Returns the results of a case as `benchmark.run_case` gives them."""
    numbers = dict.fromkeys(("us", "us_min", "us_max", "floor_us", "fraction", "row_error", "limit"), 1.0)
    return {**numbers, "backend": "portable", "red": False, "reason": None, "peers": {}, "skipped": {}}
