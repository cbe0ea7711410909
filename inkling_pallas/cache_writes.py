"""Writing new keys and values to a paged cache: by a kernel, or by a scatter that XLA compiles for any device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from inkling_pallas.core import cache_layouts
from inkling_pallas.core.card_only import by_platform, for_card
from inkling_pallas.core.devices import Card, Place, place_of, spread
from inkling_pallas.core.dispatch import kernels_of, known_backend, load_backend, require_device, usual_card
from inkling_pallas.core.errors import int32_array, refuse, require_array, require_plain, static_bool
from inkling_pallas.core.integers import div, rem
from inkling_pallas.core.paged_cache import PagedKVCache

WRITERS = ("portable", "hopper")


def write_kv(
    cache: PagedKVCache,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> PagedKVCache:
    """Returns the cache with new keys and values written to their slots.

    In place where the cache is donated to the enclosing `jax.jit`, or is the carry of a `jax.lax.scan` or the like.
    Under `jax.shard_map` slots count in the pages of the shard.

    Args:
      cache: any layout.
      k: [num_tokens, num_kv_heads, head_dim] in the dtype of the cache.
      v: like k.
      slots: int32[num_tokens], or NumPy's integers where they fit; page * block_size + offset in the page. A token
        whose slot lies outside [0, num_blocks * block_size), such as -1 for padding, is not written. Where two tokens
        have the same slot, it is unspecified which is written, also element by element: give each token its own.
      backend: "portable" (a scatter; for sharded arrays outside shard_map), "hopper" (a kernel), or "auto": the kernel
        from 1,024 tokens on where the device of the cache has it.
      interpret: run the named kernel in the Pallas GPU interpreter.

    Returns:
      A cache of the same layout.

    Raises:
      ValueError: at trace time, for a wrong shape, dtype or static argument.
      NotImplementedError: where the named backend does not take the write, as the kernel none of arrays of several
        devices outside `jax.shard_map`: see `AttentionMesh`.

    Example:
      >>> import jax.numpy as jnp, inkling_pallas as ip
      >>> cache = ip.PagedKVCache.zeros(num_blocks=4, block_size=16, num_kv_heads=1, head_dim=64)
      >>> new = jnp.ones((3, 1, 64), jnp.bfloat16)
      >>> cache = ip.write_kv(cache, new, new, jnp.array([32, 33, -1], jnp.int32))
      >>> int(cache.arrays[0].sum()) // 64
      2
    """
    if not isinstance(cache, PagedKVCache):
        advice = "Wrap raw arrays: PagedKVCache.separate(keys, values), .packed(array) or .interleaved(array)."
        raise refuse("cache", "be a PagedKVCache", type(cache).__name__, advice)
    for name, array in (("k", k), ("v", v), ("slots", slots)):
        require_plain(name, array)
    shape = ("num_tokens", cache.num_kv_heads, cache.head_dim)
    require_array("k", k, shape, cache.dtype.name, "kv heads, head_dim and dtype are those of the cache.")
    require_array("v", v, tuple(k.shape), cache.dtype.name, "It is an array like k.")
    slots = int32_array("slots", slots)
    require_array("slots", slots, (k.shape[0],), "int32", "One per row of k; -1 for a row that is not to be written.")
    arrays = tuple(map(jnp.asarray, cache.arrays))
    place = place_of((*arrays, k, v, slots))
    card = usual_card("hopper", place.device)
    no_kernel = spread({"cache": arrays[0], "k": k, "v": v, "slots": slots})
    writing = (cache.layout, arrays, len(k), card, no_kernel)
    chosen = _choose(known_backend(backend, WRITERS), place, *writing, static_bool("interpret", interpret))
    write, other = (functools.partial(_jitted_write, cache.layout, x, card, interpret) for x in (chosen, "portable"))
    takes_either = place.is_guess and backend == "auto" and chosen != "portable"
    written = by_platform(write, other if takes_either else None, arrays, *map(jnp.asarray, (k, v, slots)))
    return dataclasses.replace(cache, arrays=written)


def _choose(
    backend: str,
    place: Place,
    layout: str,
    arrays: tuple[jax.Array, ...],
    num_tokens: int,
    card: Card,
    no_kernel: str | None,
    interpret: bool,
) -> str:
    """Returns the backend of a write; raises NotImplementedError where the named one does not take it."""
    if backend == "auto":
        has_kernel = no_kernel is None and "hopper" in kernels_of(place.device)
        backend = "hopper" if has_kernel and not _passed_over(layout, arrays, num_tokens, card) else "portable"
    elif backend == "hopper":
        kernel = load_backend("write_kv")
        reason = no_kernel or kernel.unsupported(kernel.describe(arrays, layout, num_tokens, card))
        if reason is not None:
            raise NotImplementedError(reason)
    if interpret and backend == "portable":
        raise NotImplementedError(
            "interpret must be False for a scatter, which has no kernel; got True. Name a kernel."
        )
    require_device(backend, place, interpret)
    return backend


def _passed_over(layout: str, arrays: tuple[jax.Array, ...], num_tokens: int, card: Card) -> bool:
    """Returns whether `auto` leaves a write to the scatter on a device that has a kernel."""
    kernel = load_backend("write_kv")
    writing = kernel.describe(arrays, layout, num_tokens, card)
    return kernel.unsupported(writing) is not None or not kernel.is_worth_it(writing)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _jitted_write(
    layout: str,
    backend: str,
    card: Card,
    interpret: bool,
    arrays: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, ...]:
    """Runs the chosen backend. jitted, so that a kernel is traced and compiled once."""
    with jax.named_scope("inkling_write_kv"):
        if backend == "hopper":
            kernel, k = load_backend("write_kv"), for_card(k, backend, interpret)
            return kernel.write(kernel.describe(arrays, layout, len(k), card), arrays, k, v, slots, interpret)
        return _scatter(layout, arrays, k, v, slots)


def _scatter(
    layout: str, arrays: tuple[jax.Array, ...], k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, ...]:
    """Writes by one scatter per array."""
    dims = cache_layouts.cache_dims(layout, arrays[0].shape)
    # What is out of range goes to pages after the last, each token to its own: a scatter drops those, but counts -1
    # from the end, and no two tokens may share a place.
    nowhere = dims.num_blocks + jnp.arange(len(slots), dtype=jnp.int32)
    page = div(slots, dims.block_size)
    page = jnp.where((slots < 0) | (page >= dims.num_blocks), nowhere, page)
    return cache_layouts.write_tokens(layout, arrays, page, rem(jnp.maximum(slots, 0), dims.block_size), k, v)
