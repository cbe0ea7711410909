"""What a peer of the benchmark is: a call to time, and how it differs from the operator."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from inkling_pallas.bench.clocks import Rotation
from inkling_pallas.testing.cases import Case

# A peer may take this share of the device's memory.
_MEMORY_SHARE = 0.5


class PeerCall(NamedTuple):
    """A peer's way to compute a workload."""

    call: Rotation
    form: str  # what it computes, where that is not the whole operator in one call; "" where it is
    # Turns a result of `call` into [num_tokens, num_heads, head_dim]; None where it holds no such rows.
    rows: Callable[[Any], jax.Array] | None


# Makes a workload's call from its sets of inputs, or raises PeerSkippedError.
Peer = Callable[[Case, Sequence[Mapping[str, Any]]], PeerCall]


class PeerSkippedError(Exception):
    """A peer cannot compute a workload; the message says why."""


def require_memory(num_bytes: int, what: str) -> None:
    """Raises PeerSkippedError where something takes too much of the device's memory."""
    limit = device_memory() * _MEMORY_SHARE
    if num_bytes > limit:
        raise PeerSkippedError(f"{what} would take {num_bytes / 1e9:.0f} GB; {limit / 1e9:.0f} GB are free for it")


def require_gpu(name: str) -> None:
    """Raises PeerSkippedError where the default device is no GPU."""
    if jax.default_backend() != "gpu":
        raise PeerSkippedError(f"{name} needs an NVIDIA GPU")


def device_memory() -> int:
    """Returns the bytes that arrays may take on the default device; 8 GB where jax does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 8 * 10**9)
