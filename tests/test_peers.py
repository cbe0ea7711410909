"""Peers of the benchmark that are not XLA's: jax's paged kernel, and those in a process of their own."""

import dataclasses
import sys
import time
import types
import warnings

import numpy as np
import pytest
from tiny_benchmark import DECODE

from inkling_pallas.bench import workloads
from inkling_pallas.bench.peers import base, jax_paged, torch_inputs, torch_peers
from inkling_pallas.bench.peers import worker as peer_workers
from inkling_pallas.testing import row_errors
from inkling_pallas.testing.reference import reference_rel_attention

pytestmark = pytest.mark.host

ECHO = """
import sys
for line in sys.stdin:
    if "{" in line: print("noise\\n" + "answer: " + line.strip(), flush=True)
    elif "end" in line: break
"""


@pytest.fixture
def echo(monkeypatch, tmp_path):
    """Returns a worker that answers with the JSON that it is asked, is silent, or ends."""
    (tmp_path / "echoing.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = peer_workers.Worker("any", "echoing")
    yield worker
    worker.close()


def test_the_paged_kernel_says_what_it_lacks():
    for changes, reason in (
        ({"q_lens": (2, 1)}, "one row a sequence"),
        ({"window_size": (20, 0)}, "starts inside a page"),
    ):
        case = dataclasses.replace(DECODE, **changes)
        with pytest.raises(base.PeerSkippedError, match=reason):
            jax_paged.jax_paged_nobias(case, [workloads.device_inputs(case, seed=0)], interpret=True)


def test_a_worker_answers_tells_reasons_and_may_end(echo):
    assert echo.ask('{"us": 12.5, "busy": {"us": 14.0}}') == {"us": 12.5, "busy": {"us": 14.0}}
    with pytest.raises(base.PeerSkippedError, match=r"^no room$"):
        echo.ask('{"reason": "no room"}')
    with pytest.raises(base.PeerSkippedError, match="gave no answer within 20 s, or ended"):
        echo.ask("end", seconds=20)


def test_a_silent_worker_is_given_up(echo):
    start = time.monotonic()
    with pytest.raises(base.PeerSkippedError, match=r"gave no answer within 0\.2 s"):
        echo.ask("silence", seconds=0.2)
    assert time.monotonic() - start < 10


def test_each_worker_adds_a_time_or_a_reason(monkeypatch):
    class Made(peer_workers.Worker):
        def __init__(self):
            pass

        def ask(self, workload, seconds=0.0):
            return {"us": 2.0, "busy": {"us": 3.0}}

        def close(self):
            closed.append(self)

    def start(name, busy):
        assert busy
        if name == "absent":
            raise base.PeerSkippedError("not installed")
        return Made()

    closed = []
    monkeypatch.setattr(peer_workers.Worker, "start", start)
    workers = peer_workers.Workers(("there", "absent"), busy=True)
    cases = [{"name": "c", "us": us, "peers": {}, "busy": {}, "skipped": {}} for us in (1.0, 1.0, None)]
    for case, hurried in zip(cases, (False, True, False), strict=True):
        workers.time_case(case, hurried=hurried)
    assert (cases[0]["peers"], cases[0]["skipped"]) == ({"there": 2.0}, {"absent": "not installed"})
    assert cases[0]["busy"] == {"there": {"us": 3.0}}
    assert set(cases[1]["skipped"].values()) == {"the time that was left was for the other cases"}
    assert (cases[2]["peers"], cases[2]["skipped"]) == ({}, {})
    workers.close()
    assert len(closed) == 1


def test_without_a_card_no_worker_is_started():
    with pytest.raises(base.PeerSkippedError, match="flex_rel needs an NVIDIA GPU"):
        peer_workers.Worker.start("flex_rel", busy=False)


def test_a_peer_without_torch_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_peers.answer("flex_rel", DECODE)["reason"].startswith("ModuleNotFoundError")


def test_torch_calls_are_timed_in_turn_under_load_and_without_waiting_between_them(monkeypatch):
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, after):
            return 0.002

    monkeypatch.setattr(torch_inputs, "_WARM_SECONDS", 0.01)
    cuda = types.SimpleNamespace(Event=Event, synchronize=lambda: log.append("wait"))
    graphs = [types.SimpleNamespace(replay=lambda name=name: log.append(name)) for name in "ab"]
    times = torch_inputs.time_graphs(types.SimpleNamespace(cuda=cuda), graphs, lambda: log.append("flush"))
    assert times == [2.0] * 20
    warm, timed = log[: -20 * 4 - 1], log[-20 * 4 - 1 : -1]
    assert warm.count("wait") == warm.count("flush") >= 2
    assert [set(timed[i::4]) for i in range(4)] == [{"flush"}, {"event"}, {"a", "b"}, {"event"}]
    assert log[-1] == "wait"


@pytest.mark.parametrize("window", [(-1, -1), (20, 0)], ids=["global", "window"])
def test_flex_attention_computes_the_operator(window):
    torch = pytest.importorskip("torch")
    case = dataclasses.replace(DECODE, q_lens=(1, 9), window_size=window, dtype="float32")
    inputs = torch_inputs.make_inputs(torch, case, 0, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it would be faster compiled
        result = torch_peers.flex_rel(torch, case, compiled=False)(inputs)()
    assert torch_inputs.row_error(torch, case, inputs, result) < 1e-5
    assert torch_inputs.row_error(torch, case, inputs, result * 1.01) > 9e-3
    arguments = workloads.device_inputs(case, seed=0) | {
        "q": inputs.q.numpy(),
        "key_cache": inputs.keys.numpy(),
        "value_cache": inputs.values.numpy(),
        "block_table": inputs.table.numpy(),
        "rel_logits": inputs.rel_logits.numpy(),
        "softmax_scale": 1 / case.head_dim,
    }
    assert np.max(row_errors(result.numpy(), reference_rel_attention(**arguments))) < 1e-5
