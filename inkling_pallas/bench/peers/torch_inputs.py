"""Inputs, oracle and clock of the peers that need torch; they run in a process of their own, see `torch_peers`."""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from inkling_pallas.bench.busy import Busy, time_loops
from inkling_pallas.bench.energy import Meter
from inkling_pallas.bench.workloads import cost, input_bytes
from inkling_pallas.testing.cases import Case

JUDGED_ROWS = 32
ROW_LIMIT = 8e-3
_FLUSH_WORDS = 1 << 28
_MEMORY_SHARE = 0.3
_CALLS = 20
_WARM_SECONDS = 0.2  # as of the other peers, see `clocks.time_calls`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """One set of inputs as torch tensors; caches [pages, page, num_kv_heads, head_dim]."""

    q: Any
    keys: Any
    values: Any
    table: Any  # int32[batch, pages of the longest sequence]
    rel_logits: Any


def make_inputs(torch: Any, case: Case, seed: int, device: str) -> Inputs:
    """Returns N(0, 1) inputs on pages in random order."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, case.dtype))

    pages = [-(-kv_len // case.block_size) for kv_len in case.kv_lens]
    order = np.random.default_rng(seed).permutation(sum(pages)).astype(np.int32)
    table = np.zeros((len(pages), max(pages)), np.int32)
    for row, part in zip(table, np.split(order, np.cumsum(pages)[:-1]), strict=True):
        row[: len(part)] = part
    cache = (sum(pages), case.block_size, case.num_kv_heads, case.head_dim)
    return Inputs(
        q=normal(case.num_tokens, case.num_heads, case.head_dim),
        keys=normal(*cache),
        values=normal(*cache),
        table=torch.from_numpy(table).to(device),
        rel_logits=normal(case.num_tokens, case.num_heads, case.rel_extent),
    )


def contiguous(cache: Any, table: Any) -> Any:
    """Returns the keys or values of each sequence, padded to the longest: [batch, keys, num_kv_heads, head_dim]."""
    return cache[table.long()].flatten(1, 2)


def row_error(torch: Any, case: Case, inputs: Inputs, result: Any) -> float:
    """Returns the worst error of some rows of a result against the formula in float64, as a share of their norm."""
    rows = np.random.default_rng(0).permutation(case.num_tokens)[: JUDGED_ROWS - 2]
    starts = np.cumsum((0, *case.q_lens))
    worst = 0.0
    for row in {0, case.num_tokens - 1, *map(int, rows)}:
        b = int(np.searchsorted(starts, row, side="right")) - 1
        expected = _expected_row(torch, case, inputs, b, row - int(starts[b]), row)
        difference = (result[row].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = max(worst, float(difference.max().nan_to_num(nan=math.inf)))
    return worst


def _expected_row(torch: Any, case: Case, inputs: Inputs, b: int, index: int, row: int) -> Any:
    position = case.kv_lens[b] - case.q_lens[b] + index
    left = case.window_size[0]
    first = 0 if left < 0 else max(0, position - left)
    key = torch.arange(first, position + 1, device=inputs.q.device)
    page = inputs.table[b].long()[key // case.block_size]
    group = case.num_heads // case.num_kv_heads
    keys, values = (
        cache[page, key % case.block_size].double().repeat_interleave(group, dim=1)
        for cache in (inputs.keys, inputs.values)
    )
    dist = position - key
    bias = inputs.rel_logits[row][:, dist.clamp(max=case.rel_extent - 1)].double()
    scores = torch.einsum("hd,khd->hk", inputs.q[row].double(), keys) / case.head_dim
    weights = (scores + bias.where(dist < case.rel_extent, bias.new_zeros(()))).softmax(dim=-1)
    return torch.einsum("hk,khd->hd", weights, values)


def time_sets(
    torch: Any,
    case: Case,
    make: Callable[[Inputs], Callable[[], Any]],
    with_bias: bool = True,
    meter: Meter | None = None,
) -> dict[str, Any]:
    """Returns a peer's time on a case, cold, and its error; each set of inputs is a CUDA graph of one call.

    Args:
      torch: the module.
      case: the workload.
      make: returns the call of a set of inputs, whose result is [num_tokens, num_heads, head_dim].
      with_bias: whether the result has the bias in it.
      meter: calls without rests are timed, too, and their energy read; None leaves them out.
    """
    cold_bytes = 10 * torch.cuda.get_device_properties(0).L2_cache_size + 10**7
    room = int(_MEMORY_SHARE * torch.cuda.mem_get_info()[0] / input_bytes(case))
    sets = max(1, min(16, room, 1 + math.ceil(cold_bytes / cost(case).num_bytes)))
    inputs = [make_inputs(torch, case, seed, "cuda") for seed in range(sets)]
    calls = [make(one) for one in inputs]
    judged = (
        inputs[0] if with_bias else dataclasses.replace(inputs[0], rel_logits=torch.zeros_like(inputs[0].rel_logits))
    )
    error = row_error(torch, case, judged, calls[0]())
    if not error <= ROW_LIMIT:
        return {"reason": f"row error {error:.3g} is over the limit {ROW_LIMIT:.3g}"}
    graphs = [_capture(torch, call) for call in calls]
    flush = torch.ones(_FLUSH_WORDS, device="cuda")
    times = time_graphs(torch, graphs, lambda: flush.sum())
    answer: dict[str, Any] = {
        "us": statistics.median(times),
        "us_min": min(times),
        "us_max": max(times),
        "row_error": error,
    }
    if meter is not None:
        answer["busy"] = time_busy_graphs(torch, graphs, meter, answer["us"]).rounded()
    return answer


def _capture(torch: Any, call: Callable[[], Any]) -> Any:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def time_graphs(torch: Any, graphs: Sequence[Any], flush: Callable[[], Any]) -> list[float]:
    """Returns the times of calls in microseconds, each after a flush, of a chip that has been under this load a while.

    A rested chip is faster at long products, by up to an eighth on an H200.

    Args:
      torch: the module.
      graphs: replayed in turn.
      flush: overwrites the L2 cache.
    """
    turns = itertools.cycle(graphs)
    start = time.perf_counter()
    while time.perf_counter() - start < _WARM_SECONDS:
        flush()
        next(turns).replay()
        torch.cuda.synchronize()
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(_CALLS)]
    for before, after in events:  # queued, so that the chip never rests
        flush()
        before.record()
        next(turns).replay()
        after.record()
    torch.cuda.synchronize()
    return [1e3 * before.elapsed_time(after) for before, after in events]


def time_busy_graphs(torch: Any, graphs: Sequence[Any], meter: Meter, rested_us: float) -> Busy:
    """Returns what a call takes in a row of calls without rests; see `busy.time_busy`."""

    def replay(turns: int) -> Callable[[], None]:
        for _ in range(turns):
            for graph in graphs:
                graph.replay()
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    return time_loops(replay, len(graphs), meter, rested_us)
