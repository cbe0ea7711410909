"""Device time of asynchronous calls with cold caches.

On an NVIDIA GPU a call's time runs from the start of its first kernel (or copy) to the end of its last one, read from
the profiler's trace, so gaps inside a call count and gaps between calls do not. Before each call a flush kernel reads
a large buffer: it empties the L2 cache, marks in the trace where one call ends and the next begins, and gives the host
time to queue the call, so that no launch is waited for. A call that itself waits for the host, such as a loop of many
small kernels whose length only the device knows, reads longer than it is without a profiler: 893 us against 669 for
the portable backend at dec_g_b1_8k (NVIDIA H200, 2026-11-29).

Where the profiler gives no trace, whole queues are timed with and without the calls. On a CPU it is the wall clock.
"""

import contextlib
import dataclasses
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData, ProfileOptions

# A call by its number: it takes input set `number % sets`, returns what it computes and does not wait for it.
Call = Callable[[int], Any]

MAX_CALLS = 20
MIN_CALLS = 3
_SECONDS_PER_CALLABLE = 2.0
_MAX_WARM_ROUNDS = 60
_FLUSH_BYTES = 1 << 30


class Rotation(NamedTuple):
    """The call of a function that can be traced, on the sets of arguments in turn. It is a `Call`."""

    compute: Callable[..., Any]
    sets: Sequence[tuple[Any, ...]]
    compiled: Callable[..., Any] | None = None  # the same, where it was compiled before

    def __call__(self, number: int) -> Any:
        """Returns what the function computes from the arguments of a call."""
        return (self.compiled or self.compute)(*self.sets[number % len(self.sets)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of the calls of one kind, in microseconds."""

    us: float  # median
    us_min: float
    us_max: float
    calls: int


class ClockError(RuntimeError):
    """A clock cannot tell the time of some calls."""


class Span(NamedTuple):
    """A kernel or copy on the device: nanoseconds, and the name of the XLA module it belongs to."""

    start: float
    end: float
    module: str


def time_calls(calls: Mapping[str, Call], clock: "Clock", warm_seconds: float = 0.2) -> dict[str, Timing]:
    """Returns the time of each call, interleaved: every round runs each of them once.

    Args:
      calls: by name. They are compiled (or compile at their first call).
      clock: from `make_clock`.
      warm_seconds: rounds of so long come before the timed ones, since a chip under load is slower than a rested one.

    Returns:
      Median, minimum and maximum over MAX_CALLS calls, fewer (at least MIN_CALLS) where a call takes long.
    """
    counts = {}
    seconds = {name: _settled_seconds(call) for name, call in calls.items()}
    for name, one in seconds.items():
        counts[name] = max(MIN_CALLS, min(MAX_CALLS, int(_SECONDS_PER_CALLABLE / one)))
    warm_rounds = min(_MAX_WARM_ROUNDS, int(warm_seconds / sum(seconds.values())))
    rounds = [(name, i) for i in range(warm_rounds + MAX_CALLS) for name in calls if i < warm_rounds + counts[name]]
    times = clock.measure(calls, rounds)
    return {name: summarise(times[name][-counts[name] :]) for name in calls}


def summarise(times_us: Sequence[float]) -> Timing:
    """Returns the median and the spread of some times."""
    return Timing(us=statistics.median(times_us), us_min=min(times_us), us_max=max(times_us), calls=len(times_us))


def _settled_seconds(call: Call) -> float:
    """Returns the wall time of a call that has run before."""
    jax.block_until_ready(call(0))
    start = time.perf_counter()
    jax.block_until_ready(call(1))
    return time.perf_counter() - start


class WallClock:
    """Wall time of each call, waited for."""

    name = "wall"

    def measure(self, calls: Mapping[str, Call], rounds: Sequence[tuple[str, int]]) -> dict[str, list[float]]:
        """Returns the times of each call in microseconds, in order."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name, number in rounds:
            start = time.perf_counter()
            jax.block_until_ready(calls[name](number))
            times[name].append((time.perf_counter() - start) * 1e6)
        return times


class TraceClock:
    """Device time of each call, from the profiler's trace of an NVIDIA GPU."""

    name = "trace"

    def __init__(self) -> None:
        self._flush = make_flush()

    def measure(self, calls: Mapping[str, Call], rounds: Sequence[tuple[str, int]]) -> dict[str, list[float]]:
        """Returns the times of each call in microseconds, in order.

        Raises:
          ClockError: if the trace does not hold every call.
        """
        with traced() as spans:
            for name, number in rounds:
                self._flush()
                result = calls[name](number)
            jax.block_until_ready((result, self._flush()))
        per_call = [us for us in split_at_flushes(spans) if us is not None]
        if len(per_call) != len(rounds):
            raise ClockError(f"the trace holds {len(per_call)} of {len(rounds)} calls")
        times: dict[str, list[float]] = {name: [] for name in calls}
        for (name, _), us in zip(rounds, per_call, strict=True):
            times[name].append(us)
        return times


class QueueClock:
    """Mean device time of queued calls: a queue of flushes and calls less a queue of flushes.

    About 3 us too much on an H200: the gap before a call counts.
    """

    name = "queue"

    def __init__(self) -> None:
        self._flush = make_flush()

    def measure(self, calls: Mapping[str, Call], rounds: Sequence[tuple[str, int]]) -> dict[str, list[float]]:
        """Returns one mean for each call and repetition, in microseconds."""
        times: dict[str, list[float]] = {}
        for name, call in calls.items():
            numbers = [number for other, number in rounds if other == name]
            difference = [self._queue(call, numbers) - self._queue(None, numbers) for _ in range(MIN_CALLS)]
            times[name] = [1e6 * seconds / len(numbers) for seconds in difference]
        return times

    def _queue(self, call: Call | None, numbers: Sequence[int]) -> float:
        jax.block_until_ready(self._flush())
        start = time.perf_counter()
        for number in numbers:
            result = self._flush()
            result = call(number) if call else result
        jax.block_until_ready((result, self._flush()))
        return time.perf_counter() - start


Clock = WallClock | TraceClock | QueueClock


def make_clock() -> Clock:
    """Returns the best clock that the default device has."""
    if jax.default_backend() != "gpu":
        return WallClock()
    clock = TraceClock()
    try:
        clock.measure({"flush": lambda _: jnp.zeros(8).block_until_ready()}, [("flush", 0)])
    except ClockError as error:
        warnings.warn(f"no device trace ({error}); timing whole queues of calls instead", stacklevel=2)
        return QueueClock()
    return clock


def make_flush() -> Callable[[], jax.Array]:
    """Returns a call that reads a buffer far larger than any L2 cache and writes next to nothing."""

    def inkling_bench_flush(rows: jax.Array) -> jax.Array:
        return rows.sum(axis=1)

    rows = jnp.ones((_FLUSH_BYTES >> 14, 1 << 12), jnp.float32)
    flush = jax.jit(inkling_bench_flush)
    jax.block_until_ready(flush(rows))
    return lambda: flush(rows)


@contextlib.contextmanager
def traced() -> Iterator[list[Span]]:
    """Traces the device work of a block; the list fills when the block ends. Wait in the block for the work."""
    spans: list[Span] = []
    options = ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield spans
        for path in Path(folder).rglob("*.xplane.pb"):
            spans += device_spans(ProfileData.from_file(str(path)))


def device_spans(profile: Any) -> Iterator[Span]:
    """Yields the kernels and copies of the streams of all GPUs of a trace."""
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                yield from (Span(e.start_ns, e.start_ns + e.duration_ns, _module(e)) for e in line.events)


def _module(event: Any) -> str:
    return next((str(value) for name, value in event.stats if name == "hlo_module"), "")


def split_at_flushes(spans: Iterable[Span]) -> list[float | None]:
    """Returns the microseconds from the first start to the last end after each flush; None where nothing ran."""
    calls: list[float | None] = []
    first = last = 0.0
    for span in sorted(spans):
        if "inkling_bench_flush" in span.module:
            calls.append(None)
        elif calls:
            first, last = (span.start, span.end) if calls[-1] is None else (first, max(last, span.end))
            calls[-1] = (last - first) / 1e3
    return calls
