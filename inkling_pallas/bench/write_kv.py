"""Times cache writes against a copy of the same bytes, in every layout, with cold caches.

The copy reads the new keys and values and writes as many bytes elsewhere in one piece; no write can be faster.
Slots lie in pages of random order, one sequence's tokens one after the other in a page.
"""

import argparse
import dataclasses
import functools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.bench.clocks import Call, Clock, make_clock, time_calls
from inkling_pallas.cache_writes import WRITERS, write_kv
from inkling_pallas.core.cache_layouts import LAYOUTS
from inkling_pallas.core.console import positive, table
from inkling_pallas.core.dispatch import machine_backends
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.core.run_info import card_name, describe_run, write_json

_KV_HEADS = (16, 8, 1)  # of a local and a global layer of Inkling, and of one device of eight
_POOL = 4  # times the tokens of a write
_SETS = 4  # of rows and slots, taken in turn; between calls the clock empties the caches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A write."""

    layout: str
    num_kv_heads: int
    tokens: int
    block_size: int
    head_dim: int

    @property
    def name(self) -> str:
        """Of the case in tables and files."""
        return f"write_{self.layout}_h{self.num_kv_heads}_{self.tokens}_p{self.block_size}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the new keys and values; they are read once and written once."""
        return 2 * 2 * self.tokens * self.num_kv_heads * self.head_dim


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(
        prog="python -m inkling_pallas bench-write", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("--tokens", type=positive, default=8192, help="new tokens of a write (default 8192)")
    p.add_argument("--block-size", type=positive, default=16, help="tokens of a page (default 16)")
    p.add_argument("--head-dim", type=positive, default=128, help="elements of a key (default 128)")
    p.add_argument("--out", type=Path, metavar="FOLDER", help="also write a JSON file")
    return p


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Returns the writes of a run."""
    sizes = {"tokens": options.tokens, "block_size": options.block_size, "head_dim": options.head_dim}
    return [Case(layout=layout, num_kv_heads=heads, **sizes) for heads in _KV_HEADS for layout in LAYOUTS]


def rows_and_slots(case: Case, seed: int) -> tuple[jax.Array, jax.Array]:
    """Returns bf16[2, tokens, num_kv_heads, head_dim], keys and values, and int32[tokens]."""
    shape = (2, case.tokens, case.num_kv_heads, case.head_dim)
    rows = jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)
    pages = np.random.default_rng(seed).permutation(_blocks(case))[: -(-case.tokens // case.block_size)]
    slots = (pages[:, None] * case.block_size + np.arange(case.block_size)).reshape(-1)
    return rows, jnp.asarray(slots[: case.tokens], jnp.int32)


def _blocks(case: Case) -> int:
    return -(-_POOL * case.tokens // case.block_size)


def empty_cache(case: Case) -> PagedKVCache:
    """Returns the pool of a case."""
    sizes = {"num_blocks": _blocks(case), "block_size": case.block_size, "head_dim": case.head_dim}
    return PagedKVCache.zeros(**sizes, num_kv_heads=case.num_kv_heads, layout=case.layout)


def writing(case: Case, backend: str, sets: Sequence[tuple[jax.Array, jax.Array]]) -> Call:
    """Returns a call that writes a set into a pool of its own, which it donates and keeps."""
    write = jax.jit(functools.partial(write_kv, backend=backend), donate_argnums=0)
    halves = [(rows[0], rows[1], slots) for rows, slots in sets]
    pool = [empty_cache(case)]

    def call(number: int) -> jax.Array:
        pool[0] = write(pool[0], *halves[number % len(halves)])
        return pool[0].arrays[0]

    return call


def copying(sets: Sequence[tuple[jax.Array, jax.Array]]) -> dict[str, Call]:
    """Returns calls that copy the rows of a set, by name: XLA's own copy, and a kernel that also flips the bits."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "copy": jnp.copy,
        "flip": lambda rows: ~jax.lax.bitcast_convert_type(rows, jnp.uint16),
    }
    jitted = {name: jax.jit(function) for name, function in functions.items()}
    return {name: functools.partial(_call, copy, sets) for name, copy in jitted.items()}


def _call(function: Callable[[jax.Array], Any], sets: Sequence[tuple[jax.Array, jax.Array]], number: int) -> Any:
    return function(sets[number % len(sets)][0])


def differing(case: Case, backends: Sequence[str], rows: jax.Array, slots: jax.Array) -> list[str]:
    """Returns the backends after which the pool is not what a scatter leaves."""
    k, v = rows
    pools = [write_kv(empty_cache(case), k, v, slots, backend=backend) for backend in backends]
    scattered = write_kv(empty_cache(case), k, v, slots, backend="portable")
    arrays = [zip(pool.arrays, scattered.arrays, strict=True) for pool in pools]
    return [b for b, pairs in zip(backends, arrays, strict=True) if not all(bool((x == y).all()) for x, y in pairs)]


def _backends() -> list[str]:
    return [backend for backend in machine_backends() if backend in WRITERS]


def run_case(case: Case, clock: Clock) -> dict[str, Any]:
    """Returns the times of a case in microseconds; `red` names backends that wrote something else, `why` others."""
    results: dict[str, Any] = {"name": case.name, "bytes": case.num_bytes, "us": {}, "ratio": {}, "red": [], "why": {}}
    sets = [rows_and_slots(case, seed) for seed in range(_SETS)]
    for backend in _backends():
        try:
            results["red"] += differing(case, [backend], *sets[0])
        except NotImplementedError as error:
            results["why"][backend] = str(error)
    able = [b for b in _backends() if b not in (*results["red"], *results["why"])]
    calls = {backend: writing(case, backend, sets) for backend in able} | copying(sets)
    times = {name: timing.us for name, timing in time_calls(calls, clock).items()}
    results["floor_us"] = round(min(times["copy"], times["flip"]), 3)
    results["us"] = {name: round(us, 3) for name, us in times.items()}
    results["ratio"] = {backend: round(times[backend] / results["floor_us"], 3) for backend in able}
    return results


def main(argv: Sequence[str]) -> int:
    """Runs the writes; returns 0 when all is right, 1 when a backend wrote something else, 2 for bad options."""
    options = parser().parse_args(argv)
    try:
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
        clock = make_clock()
        cases = [run_case(case, clock) for case in cases_of(options)]
    except (ValueError, OSError) as error:
        print(f"bench-write: {error}")
        return 2
    head = ["case", "copy us", *(f"{b} us (ratio)" for b in _backends()), "wrong"]
    table(f"{options.tokens} tokens on {card_name()}", head, [_row(case) for case in cases])
    if options.out:
        path = options.out / f"{card_name()}-write-{options.tokens}.json"
        command = f"python -m inkling_pallas bench-write {shlex.join(argv)}".strip()
        write_json(path, {"meta": describe_run("bench-write", command, clock.name), "cases": cases})
        print(f"wrote {path}")
    return int(any(case["red"] for case in cases))


def _row(case: dict[str, Any]) -> list[str]:
    timed = [(case["us"].get(b), case["ratio"].get(b)) for b in _backends()]
    cells = ["-" if us is None else f"{us:,.1f} ({ratio:.2f})" for us, ratio in timed]
    return [case["name"], f"{case['floor_us']:,.1f}", *cells, ", ".join(case["red"]) or "-"]
