"""The main job: a serving step of Inkling's attention on request lengths of a trace, checked against the oracle.

For a global and a local layer: write the cache, run one mixed batch (a prefill chunk, a chunked prefill, decodes), then
  decode steps over
the growing cache, all through one jitted function per batch shape.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.attention import check_batch, explain, inkling_rel_attention
from inkling_pallas.console import progress, table
from inkling_pallas.errors import FLOAT_DTYPES
from inkling_pallas.reference import reference_rel_attention
from inkling_pallas.relative import log_scaling, relative_logits
from inkling_pallas.testing import baseline_rel_attention, error_limit, row_errors
from inkling_pallas.trace import Request, TraceError, read_trace

_D_REL = 16
_COLUMNS = ("case", "tokens", "keys", "backend", "ms", "row error", "limit", "margin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Shapes of one kind of layer on one device."""

    name: str
    num_heads: int
    num_kv_heads: int
    rel_extent: int
    window_size: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One batch: rows and keys per sequence; the keys include the rows."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one case showed."""

    name: str
    tokens: int
    keys: int
    backend: str
    ms: float
    row_error: float
    limit: float
    margin: float

    @property
    def red(self) -> bool:
        """True if the case failed."""
        return not self.row_error <= self.limit

    def cells(self) -> tuple[str, ...]:
        """Returns the row of the table."""
        error = f"{self.row_error:.2e}" + (" RED" if self.red else "")
        numbers = (f"{self.ms:.2f}", error, f"{self.limit:.2e}", f"{self.margin:.0f} x")
        return (self.name, f"{self.tokens:,}", f"{self.keys:,}", self.backend, *numbers)


def first_step(requests: Sequence[Request], chunk: int) -> Step:
    """Returns the mixed batch: a whole prompt, the last chunk of a longer one, and a decode for each other request."""
    by_fit = sorted(range(len(requests)), key=lambda i: (requests[i].context > chunk, -requests[i].context))
    prompt = by_fit[0]
    longest = max((i for i in range(len(requests)) if i != prompt), key=lambda i: requests[i].context, default=prompt)
    q_lens = [1] * len(requests)
    q_lens[prompt] = min(chunk, requests[prompt].context)
    if longest != prompt:
        q_lens[longest] = min(chunk, requests[longest].context)
    kv_lens = [r.context if q > 1 else r.context + 1 for r, q in zip(requests, q_lens, strict=True)]
    return Step(q_lens=tuple(q_lens), kv_lens=tuple(kv_lens))


class Server:
    """A paged cache of one layer, random keys and values, and the jitted operator over it."""

    def __init__(self, layer: Layer, options: argparse.Namespace, capacity: Sequence[int]) -> None:
        self.layer, self.options = layer, options
        self.rng = np.random.default_rng(options.seed)
        self.dtype = jnp.dtype(options.dtype)
        blocks = [-(-length // options.block_size) for length in capacity]
        pool = 1 + sum(blocks)  # page 0 belongs to nobody
        pages = 1 + self.rng.permutation(pool - 1)
        self.block_table = np.zeros((len(blocks), max(blocks)), np.int32)
        for b, end in enumerate(np.cumsum(blocks)):
            self.block_table[b, : blocks[b]] = pages[end - blocks[b] : end]
        shape = (pool, options.block_size, layer.num_kv_heads, options.head_dim)
        self.caches = (jnp.full(shape, jnp.nan, self.dtype), jnp.full(shape, jnp.nan, self.dtype))
        self.projection = self.normal(_D_REL, layer.rel_extent) / jnp.asarray(_D_REL**0.5, self.dtype)
        self.run = jax.jit(
            functools.partial(inkling_rel_attention, **self._static()), static_argnames=("max_seqlen_q",)
        )

    def _static(self) -> dict[str, Any]:
        names = ("rel_extent", "window_size")
        shapes = {name: getattr(self.layer, name) for name in names}
        return {"softmax_scale": 1.0 / self.options.head_dim, "causal": True, "backend": self.options.backend, **shapes}

    def normal(self, *shape: int) -> jax.Array:
        """Returns standard normal numbers in the cache's dtype."""
        return jnp.asarray(self.rng.standard_normal(shape, np.float32), self.dtype)

    def write(self, kv_begin: Sequence[int], kv_end: Sequence[int]) -> None:
        """Writes new random keys and values at positions [begin, end) of each sequence, in place."""
        sequence = np.repeat(np.arange(len(kv_end)), np.subtract(kv_end, kv_begin))
        position = np.concatenate([np.arange(b, e) for b, e in zip(kv_begin, kv_end, strict=True)])
        page = self.block_table[sequence, position // self.options.block_size]
        offset = position % self.options.block_size
        new = [self.normal(len(page), *self.caches[0].shape[2:]) for _ in self.caches]
        self.caches = _scatter(self.caches, page, offset, new)

    def call(self, step: Step) -> dict[str, Any]:
        """Returns the arguments of the operator for a step, with new random queries."""
        tokens = sum(step.q_lens)
        heads, head_dim = self.layer.num_heads, self.options.head_dim
        positions = np.concatenate([np.arange(k - q, k) for q, k in zip(step.q_lens, step.kv_lens, strict=True)])
        is_global = self.layer.window_size[0] == -1
        tau = log_scaling(jnp.asarray(positions, jnp.int32)) if is_global else jnp.ones((tokens,), jnp.float32)
        q = self.normal(tokens, heads, head_dim).astype(jnp.float32) * tau[:, None, None]
        return {
            "q": q.astype(self.dtype),
            "key_cache": self.caches[0],
            "value_cache": self.caches[1],
            "block_table": jnp.asarray(self.block_table),
            "cache_seqlens": jnp.asarray(step.kv_lens, jnp.int32),
            "cu_seqlens_q": jnp.asarray(np.concatenate([[0], np.cumsum(step.q_lens)]), jnp.int32),
            "max_seqlen_q": max(step.q_lens),
            "rel_logits": relative_logits(self.normal(tokens, heads, _D_REL), self.projection, tau),
        }


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(caches: Any, page: Any, offset: Any, new: Any) -> Any:
    """Writes one row of keys and of values per (page, offset)."""
    return tuple(cache.at[page, offset].set(rows) for cache, rows in zip(caches, new, strict=True))


def measure(server: Server, name: str, step: Step) -> Result:
    """Runs a step, times it once compiled, and judges it against the oracle."""
    call = server.call(step)
    check_batch(**server._static(), **call)
    out = server.run(**call)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(server.run(**call))
        times.append(time.perf_counter() - start)
    arguments = {**server._static(), **jax.tree.map(np.asarray, {k: v for k, v in call.items() if k != "max_seqlen_q"})}
    expected = reference_rel_attention(**arguments)
    limit = error_limit(row_errors(baseline_rel_attention(**arguments), expected), server.options.dtype)
    no_bias = reference_rel_attention(**dict(arguments, rel_logits=np.zeros_like(arguments["rel_logits"])))
    return Result(
        name=name,
        tokens=sum(step.q_lens),
        keys=sum(step.kv_lens),
        backend=explain(**server._static(), **call).backend,
        ms=1e3 * sorted(times)[1],
        row_error=float(row_errors(out, expected).max()),
        limit=limit,
        margin=float(row_errors(no_bias, expected).max()) / limit,
    )


def run_layer(layer: Layer, options: argparse.Namespace, step: Callable[[str], None]) -> list[Result]:
    """Returns the results of one layer: the mixed batch, then each decode step over the growing cache."""
    mixed = first_step(read_trace(options.trace)[: options.requests], options.chunk)
    server = Server(layer, options, [length + options.decode_steps for length in mixed.kv_lens])
    step(f"{layer.name} layer, prefill chunk + chunked prefill + decodes")
    server.write([0] * len(mixed.kv_lens), mixed.kv_lens)
    results = [measure(server, f"{layer.name}: mixed batch", mixed)]
    lengths = mixed.kv_lens
    for index in range(options.decode_steps):
        grown = tuple(length + 1 for length in lengths)
        step(f"{layer.name} layer, decode step {index + 1}")
        server.write(lengths, grown)
        results.append(
            measure(server, f"{layer.name}: decode step {index + 1}", Step(q_lens=(1,) * len(grown), kv_lens=grown))
        )
        lengths = grown
    return results


def parser() -> argparse.ArgumentParser:
    """Returns the demo's command line."""
    p = argparse.ArgumentParser(
        prog="python -m inkling_pallas demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument(
        "--trace",
        type=Path,
        help="CSV with columns ContextTokens, GeneratedTokens (default: a small one that is shipped)",
    )
    counts = {
        "--requests": (8, "requests taken from the trace"),
        "--chunk": (256, "most rows of one sequence in a step"),
        "--decode-steps": (3, "decode steps after the mixed batch"),
        "--block-size": (16, "keys of a page"),
        "--head-dim": (128, "head dimension"),
        "--global-heads": (8, "query heads of the global layer on this device"),
        "--global-kv-heads": (1, "its kv heads"),
        "--global-extent": (1024, "its distances with a bias"),
        "--local-heads": (8, "query heads of the local layer on this device"),
        "--local-kv-heads": (2, "its kv heads"),
        "--local-extent": (512, "its distances with a bias; its window is one less"),
    }
    for option, (default, meaning) in counts.items():
        p.add_argument(option, type=_positive, default=default, help=f"{meaning} (default {default})")
    p.add_argument("--dtype", choices=FLOAT_DTYPES, default="bfloat16")
    p.add_argument("--backend", default="auto", help="'auto' or a backend's name")
    p.add_argument("--seed", type=int, default=0)
    return p


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1; got {text!r}")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Runs the demo; returns 0 when every case is within its limit, 1 when one is red, 2 for bad options or input."""
    options = parser().parse_args(argv)
    layers = (
        Layer(
            name="global",
            num_heads=options.global_heads,
            num_kv_heads=options.global_kv_heads,
            rel_extent=options.global_extent,
            window_size=(-1, -1),
        ),
        Layer(
            name="local",
            num_heads=options.local_heads,
            num_kv_heads=options.local_kv_heads,
            rel_extent=options.local_extent,
            window_size=(options.local_extent - 1, 0),
        ),
    )
    try:
        read_trace(options.trace)
        with progress("demo", len(layers) * (1 + options.decode_steps)) as step:
            results = [result for layer in layers for result in run_layer(layer, options, step)]
    except (TraceError, ValueError, NotImplementedError) as error:
        print(f"demo: {error}")
        return 2
    device = jax.devices()[0]
    table(
        f"One serving step and {options.decode_steps} decode steps on {device.device_kind}",
        _COLUMNS,
        [r.cells() for r in results],
    )
    red = [result.name for result in results if result.red]
    verdict = (
        f"RED: {', '.join(red)} over the limit."
        if red
        else "Green: every row is within its limit of the float64 oracle."
    )
    print(f"{verdict} The margin says how many limits away the output would be without the bias.")
    return 1 if red else 0
