"""Device time, energy and clock of calls without rests, which is how a server makes them.

A card at its power limit lowers its clock, so that a call's time becomes its energy over that power: a kernel may be
faster than another after a rest, and slower in a row. Calls are made in one jitted loop after another, of which the
next is queued while one runs. Its turns rotate through the sets of inputs, so that caches are as cold as they are
after a rest.
"""

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.bench.clocks import Rotation
from inkling_pallas.bench.energy import Meter, Reading, mhz_of, watts_of
from inkling_pallas.core.errors import refuse

SETTLE_SECONDS = 0.5
SECONDS = 2.0
_LOOP_SECONDS = 0.25
_MOST_TURNS = 1 << 16


class Busy(NamedTuple):
    """A call among calls without rests. What no counter tells is None."""

    us: float
    mhz: float | None  # of the SMs
    watts: float | None  # of the board
    mj: float | None  # energy of a call

    def rounded(self) -> dict[str, float | None]:
        """Returns it for a results file."""
        return {name: None if x is None else float(f"{x:.5g}") for name, x in self._asdict().items()}


def time_busy(rotation: Rotation, meter: Meter, rested_us: float) -> Busy:
    """Returns what a call takes in a row of calls of at least SECONDS, after SETTLE_SECONDS of them.

    Args:
      rotation: compiled, or compiles at its first call.
      meter: of the default device.
      rested_us: what a call takes by itself, about.
    """
    compiled = functools.lru_cache(functools.partial(compile_loop, rotation))

    def run(turns: int) -> Callable[[], Any]:
        result = compiled(turns)()
        return lambda: jax.block_until_ready(result)

    return time_loops(run, len(rotation.sets), meter, rested_us)


def time_loops(run: Callable[[int], Callable[[], Any]], calls: int, meter: Meter, rested_us: float) -> Busy:
    """Returns what a call takes in loops of calls that are queued behind each other; see `time_busy`.

    Args:
      run: queues a loop of so many turns, and returns what waits for its end.
      calls: of a turn.
      meter: of the device.
      rested_us: what a call takes by itself, about.
    """
    turns = max(1, min(_MOST_TURNS, math.ceil(_LOOP_SECONDS * 1e6 / (rested_us * calls))))
    run(turns)()
    start = time.perf_counter()
    run(turns)()
    loops = math.ceil((SETTLE_SECONDS + SECONDS) / (time.perf_counter() - start)) + 2
    with meter.watching() as readings:
        ends = _ends_of(lambda: run(turns), loops)
    return _summarise(ends, turns * calls, readings)


def compile_loop(rotation: Rotation, turns: int) -> Callable[[], Any]:
    """Returns a call of one program that calls a function `turns` times with each of its sets of arguments.

    The results of each turn, and its arguments, go through the state of the loop: so no turn is like the one before,
    and none can be left out.
    """
    if turns < 1:
        raise refuse("turns", "be at least 1", turns, "Each turn calls once with each set.")

    def turn(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        sets, _results = lax.optimization_barrier(state)
        return sets, [rotation.compute(*arguments) for arguments in sets]

    def call_all(sets: Any) -> Any:
        shapes = [jax.eval_shape(rotation.compute, *arguments) for arguments in sets]
        results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, turns, turn, (sets, results))[1]

    sets = [tuple(arguments) for arguments in rotation.sets]
    compiled = jax.jit(call_all).lower(sets).compile()
    return lambda: compiled(sets)


def _ends_of(loop: Callable[[], Callable[[], Any]], loops: int) -> list[float]:
    """Returns when each of some loops ended, made one behind the other."""
    with concurrent.futures.ThreadPoolExecutor(1) as waiting:
        ends = []
        for i in range(loops):
            ends.append(waiting.submit(_end_of, loop()))
            if i >= 2:  # Two in the queue are enough, and their results take memory.
                ends[i - 2].result()
        return [end.result() for end in ends]


def _end_of(wait: Callable[[], Any]) -> float:
    wait()
    return time.perf_counter()


def _summarise(ends: list[float], calls: int, readings: list[Reading]) -> Busy:
    """Returns what each of `calls` of a loop took, from the ends of loops: those after the chip has settled."""
    settled = next((i for i, end in enumerate(ends[:-1]) if end - ends[0] >= SETTLE_SECONDS), len(ends) - 2)
    begin, end = ends[settled], ends[-1]
    us = 1e6 * (end - begin) / (calls * (len(ends) - 1 - settled))
    watts = watts_of(readings, begin, end)
    return Busy(us=us, mhz=mhz_of(readings, begin, end), watts=watts, mj=None if watts is None else us * watts / 1e3)
