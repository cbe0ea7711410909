"""jax's own paged decode kernel, a Pallas kernel on Triton without bias: the only peer of jax that reads pages."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.bench.clocks import Rotation
from inkling_pallas.bench.peers.base import PeerCall, PeerSkippedError, require_gpu, require_memory
from inkling_pallas.testing.cases import Case

# The fastest of those tried at 8,192 keys, pages of 128 and of 16 (NVIDIA H200, 2026-11-29).
_KEYS_PER_STEP = {128: 128, 16: 64}
_LONG = 65536  # keys from which on more splits are faster


def jax_paged_nobias(case: Case, sets: Sequence[Mapping[str, Any]], interpret: bool = False) -> PeerCall:
    """Returns `paged_attention` over pools that were laid out before as [num_kv_heads, pages, page, head_dim]."""
    if not interpret:
        require_gpu("jax's paged_attention")
    if set(case.q_lens) != {1}:
        raise PeerSkippedError("it takes one row a sequence")
    left, page = case.window_size[0], case.block_size
    first = [0 if left < 0 else max(0, kv_len - left - 1) for kv_len in case.kv_lens]
    if any(key % page for key in first):
        raise PeerSkippedError("it has no window, and this one starts inside a page")
    lengths = [kv_len - key for kv_len, key in zip(case.kv_lens, first, strict=True)]
    per_step = max(1, _KEYS_PER_STEP.get(page, 128) // page)
    splits = 32 if max(lengths) >= _LONG else 16
    splits = max(1, min(splits, -(-max(lengths) // (page * per_step))))
    width = -(-max(lengths) // (page * per_step * splits)) * per_step * splits
    elements = sets[0]["key_cache"].size
    require_memory(4 * elements * len(sets), "pools with the heads outermost")
    attend = _kernel(pages_per_compute_block=per_step, k_splits=splits, interpret=interpret)
    compute = jax.jit(lambda *arrays: attend(*arrays))
    prepared = [_arguments(case, arguments, first, lengths, width) for arguments in sets]
    return PeerCall(
        call=Rotation(compute, prepared),
        form="" if left < 0 else "the pages of the window as whole sequences",
        rows=lambda result: result,
    )


def _kernel(**options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention
    return functools.partial(paged_attention.paged_attention, num_warps=4, num_stages=2, **options)


def _arguments(
    case: Case, arguments: Mapping[str, Any], first: Sequence[int], lengths: Sequence[int], width: int
) -> tuple[jax.Array, ...]:
    """Returns (scaled q, keys, values, tables, lengths); tables have `width` pages from the first live one on."""
    table = np.asarray(arguments["block_table"])
    place = np.array(first)[:, None] // case.block_size + np.arange(width)
    table = np.take_along_axis(table, np.minimum(place, table.shape[1] - 1), axis=1)
    pools = (arguments[name].transpose(2, 0, 1, 3) for name in ("key_cache", "value_cache"))
    scale = jnp.asarray(arguments["softmax_scale"], arguments["q"].dtype)
    return arguments["q"] * scale, *pools, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)
