"""bench-write: what it times, and that a backend that writes something else is named."""

import json
from typing import Any

import pytest

from inkling_pallas import write_kv
from inkling_pallas.__main__ import main
from inkling_pallas.bench import write_kv as bench_write

pytestmark = pytest.mark.host


@pytest.fixture(autouse=True)
def one_head(monkeypatch):
    monkeypatch.setattr(bench_write, "_KV_HEADS", (1,))


def test_each_layout_is_timed_against_a_copy(tmp_path, capsys):
    assert main(["bench-write", "--tokens", "8", "--head-dim", "16", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-write-8.json")
    results = json.loads(path.read_text())
    assert [case["name"] for case in results["cases"]] == [
        f"write_{layout}_h1_8_p16" for layout in ("separate", "packed", "interleaved")
    ]
    for case in results["cases"]:
        assert case["bytes"] == 2 * 2 * 8 * 16
        assert case["red"] == []
        assert case["ratio"]["portable"] == pytest.approx(case["us"]["portable"] / case["floor_us"], rel=1e-2)
    assert "bench-write" in results["meta"]["command"]
    assert "write_packed_h1_8_p16" in capsys.readouterr().out


def test_a_backend_that_writes_something_else_is_named_and_not_timed(monkeypatch, capsys):
    def careless(cache: Any, k: Any, v: Any, slots: Any, backend: str) -> Any:
        return write_kv(cache, k, v, slots + (1 if backend == "hopper" else 0), backend="portable")

    monkeypatch.setattr(bench_write, "machine_backends", lambda: ("hopper", "portable"))
    monkeypatch.setattr(bench_write, "write_kv", careless)
    assert main(["bench-write", "--tokens", "8", "--head-dim", "16"]) == 1
    assert "hopper" in capsys.readouterr().out


def test_bad_options_are_said_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench-write", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().out.startswith("bench-write: ")
