"""One case of the benchmark: its result is judged, then it is timed beside its peers."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from inkling_pallas.attention import explain, inkling_rel_attention
from inkling_pallas.bench.busy import time_busy
from inkling_pallas.bench.ceilings import Ceilings, cold_sets
from inkling_pallas.bench.clocks import Clock, ClockError, QueueClock, Rotation, TraceClock, time_calls
from inkling_pallas.bench.energy import Meter
from inkling_pallas.bench.peers.base import Peer, PeerSkippedError, device_memory
from inkling_pallas.bench.sampled_judge import Judge
from inkling_pallas.bench.targets import NO_BIAS, OURS
from inkling_pallas.bench.workloads import cost, device_inputs, input_bytes
from inkling_pallas.core.errors import one_line
from inkling_pallas.testing.cases import Case

# What a case that is not timed lacks.
_MEASURED = ("config", "timer", "us", "us_min", "us_max", "calls", "fraction", "row_error", "limit", "compile_s")
_ARRAYS = ("q", "key_cache", "value_cache", "block_table", "cache_seqlens", "cu_seqlens_q", "rel_logits")
# All sets of inputs together may take this share of the device's memory; peers and results need some, too.
_INPUT_SHARE = 0.3


def run_case(
    case: Case, backend: str, peers: Mapping[str, Peer], clock: Clock, ceilings: Ceilings, meter: Meter | None = None
) -> dict[str, Any]:
    """Returns the results of one case; whatever goes wrong is told in `reason`, and `us` is None.

    Args:
      case: the workload.
      backend: as `inkling_rel_attention` takes it.
      peers: by name.
      clock: for calls after a rest.
      ceilings: of the device.
      meter: calls without rests are timed, too, and their energy read; None leaves them out.
    """
    results = empty_results(case, backend, ceilings)
    try:
        _run(case, results, peers, clock, meter)
    except (NotImplementedError, ClockError) as error:
        results["reason"] = one_line(error)
    except Exception as error:  # whatever a backend raises, the other cases are still to be timed
        results.update(red=True, reason=one_line(error))
    return results


def empty_results(case: Case, backend: str, ceilings: Ceilings, reason: str | None = None) -> dict[str, Any]:
    """Returns the results of a case that was not timed, and why."""
    needed = cost(case)
    floor = round(ceilings.floor_us(needed.num_bytes, needed.flops), 3)
    results: dict[str, Any] = {"name": case.name, "backend": backend, **dict.fromkeys(_MEASURED), "floor_us": floor}
    results |= {"bytes": needed.num_bytes, "flops": needed.flops, "red": False, "reason": reason}
    return results | {"busy": {}, "peers": {}, "forms": {}, "skipped": {}}


def _run(case: Case, results: dict[str, Any], peers: Mapping[str, Peer], clock: Clock, meter: Meter | None) -> None:
    """Judges and times one case, and fills in its results as it goes."""
    room = max(1, int(_INPUT_SHARE * device_memory() / input_bytes(case)))
    sets = [device_inputs(case, seed) for seed in range(min(room, cold_sets(results["bytes"])))]
    choice = explain(**sets[0], backend=results["backend"])
    results.update(backend=choice.backend, config=str(choice.config))
    ours, results["compile_s"] = _compile(sets, choice.backend)
    judge = Judge(case, sets[0])
    verdict = judge(ours(0))
    results.update(limit=verdict.limit, red=verdict.red, reason=verdict.reason)
    results["row_error"] = verdict.row_error if math.isfinite(verdict.row_error) else None
    if verdict.red:
        return
    calls = _peer_calls(case, sets, judge, peers, results)
    # Its loops wait for the host, which takes longer under the profiler than it does otherwise.
    own_clock = QueueClock() if choice.backend == "portable" and isinstance(clock, TraceClock) else clock
    together = {"": ours, **calls} if own_clock is clock else calls
    timings = time_calls(together, clock) if together else {}
    mine = timings.pop("") if own_clock is clock else time_calls({"": ours}, own_clock)[""]
    results["timer"] = own_clock.name
    results.update({name: round(value, 3) for name, value in dataclasses.asdict(mine).items()})
    results["fraction"] = round(results["floor_us"] / mine.us, 4)
    results["peers"] = {name: round(timing.us, 3) for name, timing in timings.items()}
    if meter is not None:
        rested = {OURS: mine.us, **{name: timing.us for name, timing in timings.items()}}
        _time_busy({OURS: ours, **calls}, rested, meter, results)


def _time_busy(
    calls: Mapping[str, Rotation], rested: Mapping[str, float], meter: Meter, results: dict[str, Any]
) -> None:
    """Times the calls without rests, and fills in `busy`; one that fails so is told among the skipped."""
    for name, call in calls.items():
        try:
            results["busy"][name] = time_busy(call, meter, rested[name]).rounded()
        except Exception as error:  # the loop takes more memory than a call does, and a peer may fail in any way
            results["skipped"][f"{name}, busy"] = one_line(error)


def _compile(sets: Sequence[dict[str, Any]], backend: str) -> tuple[Rotation, float]:
    """Returns the operator's call on the sets and the seconds that tracing and compiling it took."""
    static = {name: value for name, value in sets[0].items() if name not in _ARRAYS}
    arrays = [({name: inputs[name] for name in _ARRAYS},) for inputs in sets]
    operator = jax.jit(lambda arrays: inkling_rel_attention(**arrays, **static, backend=backend))
    start = time.perf_counter()
    compiled = operator.lower(*arrays[0]).compile()
    return Rotation(operator, arrays, compiled), round(time.perf_counter() - start, 3)


def _peer_calls(
    case: Case, sets: Sequence[dict[str, Any]], judge: Judge, peers: Mapping[str, Peer], results: dict[str, Any]
) -> dict[str, Rotation]:
    """Returns the calls of peers that can do a case and are right; notes their forms, and why the others cannot."""
    calls = {}
    for name, peer in peers.items():
        try:
            call, form, rows = peer(case, sets)
            result = jax.block_until_ready(call(0))
            judged = judge.without_bias if name.endswith(NO_BIAS) else judge
            reason = judged(rows(result)).reason if rows else None
        except PeerSkippedError as error:
            reason = str(error)
        except Exception as error:  # a peer may fail in any way; that is told, and the case goes on
            reason = one_line(error)
        else:
            results["forms"] |= {name: form} if form and reason is None else {}
        if reason is None:
            calls[name] = call
        else:
            results["skipped"][name] = reason
    return calls
