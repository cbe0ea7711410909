"""A soak in one process or several: each takes shapes of its own, so that no program compiles twice."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from inkling_pallas.testing.soak import Report, Soak, run_shape
from inkling_pallas.testing.soak_shapes import Shape

_Share = list[tuple[Shape, int]]


def reports(soak: Soak, done: dict[str, int], processes: int) -> Iterator[Report]:
    """Yields the reports of a run as they come; `done` has how many batches of a shape to leave out."""
    open_shapes = [(shape, done[shape.name]) for shape in soak.shapes() if done[shape.name] < len(soak.indices(shape))]
    if processes == 1:
        for shape, count in open_shapes:
            yield from run_shape(soak, shape, count)
        return
    spawned = multiprocessing.get_context("spawn")
    running: dict[Any, tuple[Any, _Share]] = {}
    for place in range(min(processes, len(open_shapes))):
        share = open_shapes[place::processes]
        receiver, sender = spawned.Pipe(duplex=False)
        worker = spawned.Process(target=_work, args=(soak, share, sender), daemon=True)
        worker.start()
        sender.close()
        running[receiver] = (worker, share)
    try:
        yield from _receive(running)
    finally:
        for worker, _ in running.values():
            worker.terminate()


def _work(soak: Soak, share: _Share, sender: Any) -> None:
    """Runs some shapes in a process of their own and sends its reports, then None."""
    try:
        for shape, count in share:
            for report in run_shape(soak, shape, count):
                sender.send(report)
        sender.send(None)
    except (KeyboardInterrupt, BrokenPipeError):  # the command ends, and says so itself
        pass


def _receive(running: dict[Any, tuple[Any, _Share]]) -> Iterator[Report]:
    """Yields what the processes send until all have ended; one that dies is a failure of the shape that it ran."""
    at = {receiver: share[0][0].name for receiver, (_, share) in running.items()}
    while running:
        ready: list[Any] = wait(list(running))
        for receiver in ready:
            try:
                report = receiver.recv()
            except EOFError:
                worker, _ = running.pop(receiver)
                worker.join()
                yield Report(shape=at[receiver], failed=f"its process ended with exit status {worker.exitcode}")
                continue
            if report is None:
                running.pop(receiver)
                continue
            at[receiver] = report.shape
            yield report
