"""Promises no single case shows: bad contents hurt nobody else, a growing cache never retraces, runs repeat."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.attention import inkling_rel_attention
from inkling_pallas.testing.cases import Case, build
from inkling_pallas.testing.limits import ERROR_FLOORS, row_errors
from inkling_pallas.testing.reference import reference_rel_attention

# Twice the floor of the dtype: the baseline of these few rows is never worse.
_LIMIT = 2 * ERROR_FLOORS["bfloat16"]
_GROWING_LENGTHS = (1, 127, 128, 129, 1023, 1024, 1025, 4097, 32768)


class ContractError(Exception):
    """A promise that a backend breaks."""


def _demand(holds: Any, promise: str) -> None:
    if not holds:
        raise ContractError(promise)


def bad_batches() -> Iterator[tuple[str, dict[str, Any], tuple[int, ...]]]:
    """Yields (what is wrong, the call, the sequences that nothing is wrong with)."""
    case = Case(name="bad", kind="bad contents", q_lens=(3, 2, 3, 4), kv_lens=(200, 40, 129, 70))
    good = build(case)
    for page in (-1, 10**6, 2**31 - 1, -(2**31)):
        table = good["block_table"].copy()
        table[1, 0] = page
        yield f"page id {page} inside the live range", dict(good, block_table=table), (0, 2, 3)
    for length in (10**6, -5, 2**31 - 1, -(2**31)):
        lengths = good["cache_seqlens"].copy()
        lengths[2] = length
        yield f"cache_seqlens {length}", dict(good, cache_seqlens=lengths), (0, 1, 3)
    for value, sound in ((1, (0, 3)), (2**31 - 1, (0, 3)), (-7, (0, 3))):
        offsets = good["cu_seqlens_q"].copy()
        offsets[2] = value
        yield f"cu_seqlens_q[2] = {value}", dict(good, cu_seqlens_q=offsets), sound
    for name in ("kv_offset", "total_seqlens"):
        for value in (2**31 - 1, -(2**31)):
            array = np.zeros(4, np.int32) if name == "kv_offset" else good["cache_seqlens"].copy()
            array[1] = value
            yield f"{name} {value}", {**good, name: array}, (0, 2, 3)
    yield "q_len above max_seqlen_q", dict(good, max_seqlen_q=2), (1,)


def bad_contents(backend: str, operator: Callable[..., Any] = inkling_rel_attention) -> None:
    """Raises ContractError if wrong lengths or page ids of one sequence change another's rows."""
    for what, call, sound in bad_batches():
        good = build(Case(name="bad", kind="bad contents", q_lens=(3, 2, 3, 4), kv_lens=(200, 40, 129, 70)))
        expected = reference_rel_attention(**good)
        out = np.asarray(operator(**call, backend=backend))
        for b in sound:
            rows = slice(*good["cu_seqlens_q"][b : b + 2])
            error = row_errors(out[rows], expected[rows]).max()
            _demand(error <= _LIMIT, f"with {what}, sequence {b} has row error {error:.3g}")


def growing_cache(backend: str, operator: Callable[..., Any] = inkling_rel_attention) -> None:
    """Raises ContractError if one compiled function is wrong, or traces again, as a cache grows to 32,768 keys."""
    longest = max(_GROWING_LENGTHS)
    case = Case(
        name="growing",
        kind="growing cache",
        q_lens=(1,),
        kv_lens=(longest,),
        rel_extent=1024,
        block_size=128,
        poison=(),
    )
    call = build(case)
    static = {key: value for key, value in call.items() if not isinstance(value, np.ndarray)}
    arrays = {key: value for key, value in call.items() if isinstance(value, np.ndarray)}
    traces = 0

    def counted(arrays: dict[str, Any]) -> Any:
        nonlocal traces
        traces += 1
        return operator(**arrays, **static, backend=backend)

    compiled = jax.jit(counted)
    on_device = jax.tree.map(jnp.asarray, arrays)
    for length in _GROWING_LENGTHS:
        lengths = np.array([length], np.int32)
        out = compiled(dict(on_device, cache_seqlens=lengths))
        error = row_errors(out, reference_rel_attention(**dict(call, cache_seqlens=lengths))).max()
        _demand(error <= _LIMIT, f"at {length} keys the row error is {error:.3g}")
    _demand(traces == 1, f"{traces} traces where one was enough")


def repeatable(backend: str, operator: Callable[..., Any] = inkling_rel_attention) -> None:
    """Raises ContractError if two runs differ in a bit."""
    case = Case(
        name="repeat", kind="repeatable", q_lens=(1, 64, 1), kv_lens=(3000, 700, 129), num_heads=8, num_kv_heads=1
    )
    run = functools.partial(operator, **build(case), return_lse=True, backend=backend)
    first, second = jax.device_get((run(), run()))
    same = all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(first, second, strict=True))
    _demand(same, "two runs of the same call differ")


CONTRACT_CHECKS: dict[str, Callable[[str], None]] = {
    "bad contents": bad_contents,
    "growing cache": growing_cache,
    "repeatable": repeatable,
}
