"""What the device can do at best, measured: a cold read of so many bytes, and multiplying matrices."""

import bisect
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.bench.clocks import Call, Clock, time_calls
from inkling_pallas.core.devices import card_of

_GPU_SIZES = tuple(1 << n for n in (16, *range(20, 32)))
_CPU_SIZES = tuple(1 << n for n in (16, 20, 22, 24, 26))
_MAX_BUFFERS = 16
# Words that an XLA kernel sums up at a time; which is fastest depends on the size. A ring of TMA copies without
# arithmetic (Pallas Mosaic GPU, 4 to 32 KiB a copy, 1 or 2 CTAs an SM) read no size faster: 9.34 us against 9.01 for
# 33.6 MB, 244.9 against 233.4 for 1,074 MB. Over one-dimensional buffers the sums took 9.73 and 238.0, in another run
# (NVIDIA H200, 2026-11-29).
_ROW_WORDS = (1024, 4096, 16384, 65536)
_LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """The fastest cold read of a size."""

    num_bytes: int
    us: float
    kernel: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The fastest cold reads by ascending size, and the rate of a large matrix product."""

    reads: tuple[Read, ...]
    matmul_tflops: float
    matmul_kernel: str

    def cold_read_us(self, num_bytes: float) -> float:
        """Returns the time in which the device can read so many bytes from memory: a curve that never falls.

        Between measured sizes it is interpolated, past the last one it goes on at that size's rate.
        """
        sizes = [read.num_bytes for read in self.reads]
        # No read can be slower than that of a larger size: such a time is the kernel's fault, not the memory's.
        times = np.minimum.accumulate([read.us for read in self.reads][::-1])[::-1]
        if num_bytes >= sizes[-1]:
            return float(times[-1] * num_bytes / sizes[-1])
        at = max(0, bisect.bisect_right(sizes, num_bytes) - 1)
        share = max(0.0, (num_bytes - sizes[at]) / (sizes[at + 1] - sizes[at]))
        return float(times[at] + share * (times[at + 1] - times[at]))

    def floor_us(self, num_bytes: float, flops: float) -> float:
        """Returns the time that no kernel can beat: the larger of reading the bytes and doing the flops."""
        return max(self.cold_read_us(num_bytes), flops / (self.matmul_tflops * 1e6))

    def __str__(self) -> str:
        last = self.reads[-1]
        return f"reads {last.num_bytes / last.us / 1e3:,.0f} GB/s, multiplies at {self.matmul_tflops:.2f} TFLOP/s"

    def as_json(self) -> dict[str, Any]:
        """Returns the ceilings for a results file."""
        reads = [{"bytes": r.num_bytes, "us": round(r.us, 3), "kernel": r.kernel} for r in self.reads]
        return {"read": reads, "matmul_tflops": round(self.matmul_tflops, 4), "matmul_kernel": self.matmul_kernel}


def measure_ceilings(clock: Clock) -> Ceilings:
    """Measures the default device."""
    on_gpu = jax.default_backend() == "gpu"
    reads = []
    for num_bytes in _GPU_SIZES if on_gpu else _CPU_SIZES:
        times = measure_readers(clock, num_bytes)
        kernel = min(times, key=lambda name: times[name])
        reads.append(Read(num_bytes=num_bytes, us=times[kernel], kernel=kernel))
    rates = measure_products(clock, 8192 if on_gpu else 512)
    kernel = max(rates, key=lambda name: rates[name])
    return Ceilings(reads=tuple(reads), matmul_tflops=rates[kernel], matmul_kernel=kernel)


def cold_bytes() -> int:
    """Returns how much is read before an input is used again: over ten times the L2 cache of a card."""
    card = card_of()
    return 64 * 10**6 if card is None else 10 * card.l2_cache + 10**7


def cold_sets(num_bytes: int) -> int:
    """Returns how many disjoint sets of so many bytes to rotate over: 1 where a set is larger than `cold_bytes`.

    On a GPU every call also follows a flush that reads more than `cold_bytes`, so _MAX_BUFFERS sets are enough.
    """
    return 1 if num_bytes >= cold_bytes() else min(_MAX_BUFFERS, 1 + math.ceil(cold_bytes() / num_bytes))


def measure_readers(clock: Clock, num_bytes: int) -> dict[str, float]:
    """Returns the median time in microseconds of each kernel that reads int32 words of a size, by its name."""
    buffers = [_random_words(seed, num_bytes // (4 * _LANES)) for seed in range(cold_sets(num_bytes))]
    calls = {f"xla_sum_{width}": _reading(width, buffers) for width in _ROW_WORDS if 4 * width <= num_bytes}
    return {name: timing.us for name, timing in time_calls(calls, clock).items()}


@functools.partial(jax.jit, static_argnums=1)
def _random_words(seed: int, rows: int) -> jax.Array:
    return jax.random.bits(jax.random.key(seed), (rows, _LANES), jnp.uint32).astype(jnp.int32)


def _reading(width: int, buffers: list[jax.Array]) -> Call:
    read = jax.jit(lambda words: words.reshape(-1, width).sum(axis=1, dtype=jnp.int32))
    return lambda number: read(buffers[number % len(buffers)])


def measure_products(clock: Clock, size: int) -> dict[str, float]:
    """Returns the rate in TFLOP/s of the fastest square product by each way to compute it, by its name.

    On a GPU: bfloat16, by XLA's own choice and by cuBLAS. A CPU can be faster in float32.
    """
    on_gpu = jax.default_backend() == "gpu"
    calls = {"xla_bfloat16": _product(size, "bfloat16", None)}
    if on_gpu:
        calls["cublas_bfloat16"] = _product(size, "bfloat16", {"xla_gpu_enable_triton_gemm": False})
    else:
        calls["xla_float32"] = _product(size, "float32", None)
    # The fastest call of a rested chip: a long run of products meets its power limit (690 against 728 TFLOP/s).
    timings = time_calls(calls, clock, warm_seconds=0.0)
    return {name: 2 * size**3 / timing.us_min / 1e6 for name, timing in timings.items()}


def _product(size: int, dtype: str, options: dict[str, Any] | None) -> Call:
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), jnp.float32).astype(dtype) for key in keys)
    multiply = jax.jit(lambda a, b: a @ b, compiler_options=options)
    return lambda _: multiply(a, b)
