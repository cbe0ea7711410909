"""Peers that run in a process of their own, since their libraries want the GPU for themselves."""

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from inkling_pallas.bench.peers.base import PeerSkippedError, require_gpu

_FA4 = ("torch", "flash_attn", "cutlass")
# Peers, and what must be importable for each.
WORKER_PEERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"flex_rel": ("torch",), "fa4_rel": _FA4, "fa4_nobias": _FA4}
)
# A first call compiles.
SECONDS_PER_CASE = 90.0
_PROGRAM = "inkling_pallas.bench.peers.torch_peers"
_BUSY = "busy"
_ANSWER = "answer: "


class Worker:
    """A process that times one peer on workloads by name."""

    def __init__(self, name: str, program: str = _PROGRAM, *, busy: bool = False) -> None:
        """Starts the process; whatever is wrong is told by `ask`. With `busy` it also times calls without rests."""
        command = [sys.executable, "-m", program, name, *([_BUSY] if busy else [])]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **pipes)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @classmethod
    def start(cls, name: str, busy: bool) -> Self:
        """Returns the worker of a peer; with `busy` it also times calls without rests.

        Raises:
          PeerSkippedError: where it cannot run.
        """
        require_gpu(name)
        for module in WORKER_PEERS[name]:
            if importlib.util.find_spec(module) is None:
                raise PeerSkippedError(f"{module} is not installed")
        return cls(name, busy=busy)

    def ask(self, workload: str, seconds: float = SECONDS_PER_CASE) -> dict[str, Any]:
        """Returns the median time of a workload in microseconds as `us`, and perhaps `busy`.

        Raises:
          PeerSkippedError: if the peer has none, or gives no answer in time. It is not asked again then.
        """
        stdin: Any = self._process.stdin
        try:
            stdin.write(workload + "\n")
            stdin.flush()
            answer = self._answers.get(timeout=seconds)
        except (BrokenPipeError, queue.Empty):
            answer = None
        if answer is None:
            self.close()
            raise PeerSkippedError(f"its process gave no answer within {seconds:g} s, or ended")
        if "reason" in answer:
            raise PeerSkippedError(answer["reason"])
        return answer

    def _listen(self) -> None:
        """Queues the answers, and None at their end; lines that a library printed are passed over."""
        stdout: Any = self._process.stdout
        for line in stdout:
            if line.startswith(_ANSWER):
                self._answers.put(json.loads(line.removeprefix(_ANSWER)))
        self._answers.put(None)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._listener.join()
        self._process.communicate()


class Workers:
    """The workers of a run: started when first asked, and asked no more once one did not answer."""

    def __init__(self, names: tuple[str, ...], *, busy: bool = False) -> None:
        self._busy = busy
        self._workers: dict[str, Worker | str | None] = dict.fromkeys(names)

    def time_case(self, case: dict[str, Any], *, hurried: bool) -> None:
        """Adds to the results of a case what each worker says; a case without a time of ours is left alone.

        Args:
          case: of a results file.
          hurried: ask nobody, since the time that is left is for the other cases.
        """
        for name in self._workers if case["us"] is not None else ():
            try:
                if hurried:
                    raise PeerSkippedError("the time that was left was for the other cases")
                answer = self._worker(name).ask(case["name"])
                case["peers"][name] = round(answer["us"], 3)
                case["busy"] |= {name: answer["busy"]} if "busy" in answer else {}
            except PeerSkippedError as error:
                case["skipped"][name] = str(error)

    def _worker(self, name: str) -> Worker:
        if self._workers[name] is None:
            try:
                self._workers[name] = Worker.start(name, self._busy)
            except PeerSkippedError as error:
                self._workers[name] = str(error)
        worker = self._workers[name]
        if not isinstance(worker, Worker):
            raise PeerSkippedError(str(worker))
        return worker

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers.values():
            if isinstance(worker, Worker):
                worker.close()
