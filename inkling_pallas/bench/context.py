"""Times a decode over long contexts on several devices, each with its part of the keys, against one device with all.

Both read the same keys, and both are checked against the float64 oracle, on the first and the last kv head. One bias
per head has the weight of all keys together: without it, or one key beside it, the output is another.
"""

import argparse
import dataclasses
import functools
import math
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.attention import explain, inkling_rel_attention
from inkling_pallas.core.console import positive, table
from inkling_pallas.core.errors import FLOAT_DTYPES, refuse
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.core.run_info import card_name, describe_run, write_json
from inkling_pallas.parallel.context import ContextShards, cut_context, take_pages
from inkling_pallas.parallel.mesh import AttentionMesh
from inkling_pallas.testing.limits import baseline_rel_attention, error_limit, row_errors
from inkling_pallas.testing.reference import reference_rel_attention

_CALLS_AT_ONCE = 50  # so that the first one's way to the devices counts little
_BY_PART = ("block_table", "cache_seqlens", "kv_offset", "capacity")


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(
        prog="python -m inkling_pallas bench-context",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    counts = {
        "--keys": (1_048_576, "keys of each sequence"),
        "--batch": (1, "sequences"),
        "--heads": (64, "query heads"),
        "--kv-heads": (8, "kv heads"),
        "--head-dim": (128, "head dimension"),
        "--extent": (1024, "distances with a bias"),
        "--block-size": (64, "keys of a page"),
        "--repeats": (20, f"timed rounds of {_CALLS_AT_ONCE} calls, one device and all in turn"),
    }
    for option, (default, meaning) in counts.items():
        p.add_argument(option, type=positive, default=default, help=f"{meaning} (default {default})")
    p.add_argument("--devices", type=positive, help="devices to cut for (default: all)")
    p.add_argument("--dtype", choices=FLOAT_DTYPES, default="bfloat16")
    p.add_argument("--backend", default="auto", help="'auto' or a backend's name")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, metavar="FOLDER", help="also write a JSON file")
    return p


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A decode step: whole on the first device, and cut."""

    arrays: dict[str, Any]
    static: dict[str, Any]
    devices: AttentionMesh
    shards: ContextShards
    cut_cache: PagedKVCache


def make_workload(options: argparse.Namespace) -> Workload:
    """Returns the inputs of both forms; a part's pages lie in random order in its pool.

    Raises:
      ValueError: if there are too few devices.
    """
    count = options.devices or len(jax.devices())
    if count > len(jax.devices()):
        raise refuse("--devices", f"be at most {len(jax.devices())}, which are here", count, "Or force host devices.")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((count,), ("context",), axis_types=auto, devices=jax.devices()[:count])
    heads = {"num_heads": options.heads, "num_kv_heads": options.kv_heads}
    devices = AttentionMesh.make(mesh, **heads, context_axis="context")
    rng = np.random.default_rng(options.seed)
    blocks = -(-options.keys // options.block_size)
    tables = 1 + rng.permutation(options.batch * blocks).astype(np.int32).reshape(options.batch, blocks)
    shards, pages = _shuffled_cut(tables, options, count, rng)
    arrays = _arrays(options, tables)
    return Workload(
        arrays=jax.device_put(arrays, jax.devices()[0]),
        static={
            "max_seqlen_q": 1,
            "softmax_scale": 1 / options.head_dim,
            "causal": True,
            "window_size": (-1, -1),
            "rel_extent": options.extent,
            "backend": options.backend,
        },
        devices=devices,
        shards=shards,
        cut_cache=devices.place(take_pages(arrays["key_cache"], pages)),
    )


def _shuffled_cut(
    tables: np.ndarray, options: argparse.Namespace, count: int, rng: np.random.Generator
) -> tuple[ContextShards, np.ndarray]:
    """Returns `cut_context` with the pages of each part in random order, page 0 first."""
    lengths = [options.keys] * options.batch
    shards, pages = cut_context(tables.tolist(), lengths, num_shards=count, block_size=options.block_size)
    order = np.concatenate([[0], 1 + rng.permutation(pages.shape[1] - 1)])
    shuffled = np.empty_like(pages)
    shuffled[:, order] = pages
    return dataclasses.replace(shards, block_table=order[shards.block_table].astype(np.int32)), shuffled


def _arrays(options: argparse.Namespace, tables: np.ndarray) -> dict[str, Any]:
    """Returns the arrays of the call on one device."""
    keys = jax.random.split(jax.random.key(options.seed), 4)
    normal = jax.jit(functools.partial(jax.random.normal, dtype=jnp.dtype(options.dtype)), static_argnums=1)
    pool = (1 + tables.size, options.block_size, options.kv_heads, options.head_dim)
    rel_logits = normal(keys[3], (options.batch, options.heads, options.extent))
    spike = min(options.extent, options.keys) - 1
    return {
        "q": normal(keys[2], (options.batch, options.heads, options.head_dim)) * jnp.asarray(4, options.dtype),
        "key_cache": PagedKVCache.separate(normal(keys[0], pool), normal(keys[1], pool)),
        "block_table": tables,
        "cache_seqlens": np.full(options.batch, options.keys, np.int32),
        "cu_seqlens_q": np.arange(options.batch + 1, dtype=np.int32),
        "rel_logits": rel_logits.at[:, :, spike].set(math.log(options.keys)),
    }


def calls_of(workload: Workload) -> tuple[Callable[[], jax.Array], Callable[[], jax.Array]]:
    """Returns the call on one device and the call on all, compiled when first called."""
    arrays, static = workload.arrays, workload.static
    alone = jax.jit(lambda arrays: inkling_rel_attention(**arrays, value_cache=None, **static))
    together = jax.jit(
        lambda q, cache, shards, rest: workload.devices.attend(q, cache, shards=shards, **rest, **static)
    )
    everywhere = jax.sharding.NamedSharding(workload.devices.mesh, jax.P())
    rest = {name: arrays[name] for name in ("q", "cu_seqlens_q", "rel_logits")}
    rest = jax.device_put(rest, everywhere)
    q = rest.pop("q")
    by_part = jax.sharding.NamedSharding(workload.devices.mesh, jax.P("context"))
    shards = dataclasses.replace(
        workload.shards,
        **{name: jax.device_put(getattr(workload.shards, name), by_part) for name in _BY_PART},
        total_seqlens=jax.device_put(workload.shards.total_seqlens, everywhere),
    )
    return lambda: alone(arrays), lambda: together(q, workload.cut_cache, shards, rest)


def judge(workload: Workload, results: Sequence[jax.Array]) -> dict[str, Any]:
    """Returns the worst row error of any result on the first and the last kv head, its limit and its margin."""
    arrays, static = workload.arrays, workload.static
    cache = arrays["key_cache"]
    group = arrays["q"].shape[1] // cache.num_kv_heads
    worst, limits, margins = 0.0, [], []
    for head in sorted({0, cache.num_kv_heads - 1}):
        mine = slice(head * group, (head + 1) * group)
        call: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items() if name != "key_cache"}
        call |= {name: call[name][:, mine] for name in ("q", "rel_logits")}
        call |= {"key_cache": np.asarray(cache.arrays[0][:, :, head : head + 1])}
        call |= {"value_cache": np.asarray(cache.arrays[1][:, :, head : head + 1])} | static
        expected = reference_rel_attention(**call)
        limits.append(error_limit(row_errors(baseline_rel_attention(**call), expected), call["q"].dtype.name))
        without_bias = reference_rel_attention(**dict(call, rel_logits=np.zeros_like(call["rel_logits"])))
        margins.append(float(row_errors(without_bias, expected).min()) / limits[-1])
        worst = max(worst, *(float(row_errors(np.asarray(out)[:, mine], expected).max()) for out in results))
    return {"row_error": worst, "limit": min(limits), "margin": min(margins), "red": not worst <= min(limits)}


def measure(call: Callable[[], jax.Array]) -> float:
    """Returns microseconds of a call, of several that wait for each other on the device alone."""
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(_CALLS_AT_ONCE)])
    return 1e6 * (time.perf_counter() - start) / _CALLS_AT_ONCE


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what a run has shown; times are None where the numbers are red."""
    workload = make_workload(options)
    alone, together = calls_of(workload)
    result: dict[str, Any] = {"devices": workload.devices.num_shards}
    result["backend"] = explain(**workload.arrays, value_cache=None, **workload.static).backend
    result |= judge(workload, [alone(), together()]) | dict.fromkeys(("one_us", "all_us", "speedup"))
    if result["red"]:
        return result | {"row_error": result["row_error"] if math.isfinite(result["row_error"]) else None}
    times = [(measure(alone), measure(together)) for _ in range(options.repeats)]
    for name, samples in zip(("one_us", "all_us"), zip(*times, strict=True), strict=True):
        result[name] = round(statistics.median(samples), 2)
        result |= {f"{name}_min": round(min(samples), 2), f"{name}_max": round(max(samples), 2)}
    result["speedup"] = round(result["one_us"] / result["all_us"], 3)
    return result


def main(argv: Sequence[str]) -> int:
    """Runs the comparison; returns 0 when it is green, 1 when a row is over its limit, 2 for bad options."""
    options = parser().parse_args(argv)
    try:
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
        result = run(options)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"bench-context: {error}")
        return 2
    title = f"{options.batch} x {options.keys:,} keys, heads ({options.heads}, {options.kv_heads}), {card_name()}"
    table(title, ("what", "result"), [(name, str(value)) for name, value in result.items()])
    if options.out:
        path = options.out / f"{card_name()}-context-{options.batch}x{options.keys}-on-{result['devices']}.json"
        command = f"python -m inkling_pallas bench-context {shlex.join(argv)}".strip()
        write_json(path, {"meta": describe_run("bench-context", command, "host clock"), "result": result})
        print(f"wrote {path}")
    return 1 if result["red"] else 0
