"""Cache writes on sm_90: rows of keys and values to their slots in the pages, by bulk copies alone.

Each of a CTA's four warps takes a run of tokens of K or of V: one copy brings the run to shared memory, then one copy
per token takes it to its slot. No register holds an element, and a token's heads go out in one copy in every layout.
Many small CTAs per SM keep enough bytes in flight.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.cache_layouts import CacheDims, cache_dims
from inkling_pallas.core.devices import H200, Card
from inkling_pallas.core.integers import div, rem
from inkling_pallas.kernels import mosaic

_WARPS = 4  # two runs of tokens, each of K and of V
_RUN_BYTES = 8 * 1024  # of a warp: a CTA takes 32 KiB, and six share an SM
_MAX_RUN = 16  # copies that a warp issues are unrolled
_MANY_CTAS = 4  # for each SM: short runs for few tokens, so that all SMs take part
_MANY_TOKENS = 1024
_SMEM_ALIGNMENT = 128  # of the start of a copy
_MAX_BOX = 256  # elements of a copy along an axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writing:
    """The static facts of a write. Hashable."""

    dims: CacheDims
    layout: str
    dtype: str
    num_tokens: int
    card: Card = H200

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's keys."""
        return self.dims.num_kv_heads * self.dims.head_dim * np.dtype(jnp.dtype(self.dtype)).itemsize

    @property
    def run(self) -> int:
        """Tokens of a warp."""
        spread = -(-self.num_tokens // (2 * _MANY_CTAS * self.card.num_sms))
        return max(1, min(_RUN_BYTES // self.row_bytes, _MAX_RUN, spread))


def unsupported(writing: Writing) -> str | None:
    """Returns why the kernel does not take a write, or None if it does."""
    heads, head_dim = writing.dims.num_kv_heads, writing.dims.head_dim
    itemsize = writing.row_bytes // (heads * head_dim)
    rules: list[tuple[bool, str]] = [
        (writing.num_tokens > 0, "k must have a row on Hopper; got none."),
        (head_dim * itemsize % 16 == 0, f"head_dim must fill a multiple of 16 bytes on Hopper; got {head_dim}."),
        (max(heads, head_dim) <= _MAX_BOX, f"kv heads and head_dim must be at most {_MAX_BOX} on Hopper."),
        (
            writing.row_bytes % _SMEM_ALIGNMENT == 0 and writing.row_bytes <= 4 * _RUN_BYTES,
            f"a token's keys must take a multiple of 128 bytes, at most 32 KiB, on Hopper; got {writing.row_bytes}.",
        ),
    ]
    return next((f'{sentence} Use backend="portable".' for holds, sentence in rules if not holds), None)


def is_worth_it(writing: Writing) -> bool:
    """Returns whether `auto` takes the kernel where it can: not for few tokens, of which no measurement is here yet."""
    return writing.num_tokens >= _MANY_TOKENS


def write(
    writing: Writing, arrays: tuple[jax.Array, ...], k: jax.Array, v: jax.Array, slots: jax.Array, interpret: Any
) -> tuple[jax.Array, ...]:
    """Returns the arrays of a cache with the tokens written, in place where XLA can.

    Args:
      writing: supported.
      arrays: those of the cache.
      k: [num_tokens, num_kv_heads, head_dim].
      v: like k.
      slots: int32[num_tokens]; a token whose slot is not in the pool is not written.
      interpret: a bool, or the interpreter's parameters.
    """
    run, dims = writing.run, writing.dims
    arrays = mosaic.apart(arrays)
    refs = [jax.new_ref(_by_kind(array, writing)) for array in arrays]

    def body(k: Any, v: Any, slots: Any, *refs: Any, smem: Any, ready: Any) -> None:
        _program((k, v), slots, refs, smem, ready, writing, bool(interpret))

    mosaic.kernel(
        body,
        interpret=interpret,
        auto_barriers=False,
        out_type=(),
        grid=(-(-writing.num_tokens // (2 * run)),),
        grid_names=("cta",),
        num_threads=1,
        scratch_types={
            "smem": plgpu.SMEM((_WARPS, run, dims.num_kv_heads, dims.head_dim), jnp.dtype(writing.dtype)),
            "ready": plgpu.Barrier(num_arrivals=1, num_barriers=_WARPS),
        },
    )(k, v, slots, *refs)
    return mosaic.apart(tuple(jax.freeze(ref).reshape(array.shape) for ref, array in zip(refs, arrays, strict=True)))


def _by_kind(array: jax.Array, writing: Writing) -> jax.Array:
    """Returns a view in which an interleaved cache has an axis for (keys, values) of its own."""
    if writing.layout != "interleaved":
        return array
    return array.reshape(*array.shape[:2], writing.dims.num_kv_heads, 2, writing.dims.head_dim)


def _slot_of(refs: Any, values: bool, page: Any, offset: Any, writing: Writing) -> Any:
    """Returns the ref [num_kv_heads, head_dim] of one token's keys or values in any layout."""
    if writing.layout == "packed":
        start = writing.dims.head_dim if values else 0
        return refs[0].at[page, :, offset, start : start + writing.dims.head_dim]
    if writing.layout == "interleaved":
        return refs[0].at[page, offset, :, int(values)]
    return refs[int(values)].at[page, offset]


def _program(sources: Any, slots: Any, refs: Any, smem: Any, ready: Any, writing: Writing, interpret: bool) -> None:
    """The kernel of one CTA: each warp waits for the one copy that arrives on its barrier."""
    mosaic.wait_for_previous_kernel(interpret=interpret)
    mosaic.let_next_kernel_launch(interpret=interpret)
    first = lax.axis_index("cta") * (2 * writing.run)

    def copy_run(warp: int) -> None:
        values, begin = bool(warp % 2), first + (warp // 2) * writing.run
        _copy_run(sources[int(values)], slots, refs, smem.at[warp], ready.at[warp], begin, values, writing)

    @plgpu.warp_map
    def _(warp: jax.Array) -> None:
        for i in range(_WARPS):
            pl.when(warp == i)(functools.partial(copy_run, i))


def _copy_run(
    source: Any, slots: Any, refs: Any, smem: Any, ready: Any, begin: jax.Array, values: bool, writing: Writing
) -> None:
    """Copies the tokens [begin, begin + run); those past the last one are not there."""
    last = writing.num_tokens - 1
    plgpu.copy_gmem_to_smem(source.at[pl.ds(begin, writing.run)], smem, ready)
    places = [slots[jnp.minimum(begin + i, last)] for i in range(writing.run)]
    plgpu.barrier_wait(ready)
    for i, slot in enumerate(places):
        page, offset = div(slot, writing.dims.block_size), rem(slot, writing.dims.block_size)
        # A slot is never trusted: nothing on the way checks an address.
        live = (slot >= 0) & (page < writing.dims.num_blocks) & (begin + i <= last)

        @pl.when(live)
        def _(i: int = i, page: jax.Array = page, offset: jax.Array = offset) -> None:
            plgpu.copy_smem_to_gmem(smem.at[i], _slot_of(refs, values, page, offset, writing))

    # Shared memory must outlive the reads; the end of the kernel waits for the writes.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def describe(cache_arrays: tuple[Any, ...], layout: str, num_tokens: int, card: Card = H200) -> Writing:
    """Returns the static facts of a write to the arrays of a cache."""
    dims = cache_dims(layout, cache_arrays[0].shape)
    dtype = np.dtype(cache_arrays[0].dtype).name
    return Writing(dims=dims, layout=layout, dtype=dtype, num_tokens=num_tokens, card=card)
