"""How a paged cache lies in memory: the only place where plain JAX learns where a token's key and value stand.

======================  =============================================================  ==========================
layout                  array(s)                                                       used by
======================  =============================================================  ==========================
separate                two of [num_blocks, block_size, num_kv_heads, head_dim]        nano-vllm-jax, EasyDeL
packed                  [num_blocks, num_kv_heads, block_size, 2 * head_dim], K first  vLLM
interleaved             [num_blocks, block_size, 2 * num_kv_heads, head_dim], k0 v0    tpu-inference, sglang-jax
                        k1 v1 ...
======================  =============================================================  ==========================

`split` and `join` convert between a layout and K and V [..., chunk, num_kv_heads, head_dim], where the leading axes are
any and a chunk is a run of tokens of one page. `read_chunks` and `write_tokens` address pages in the layout itself, so
that no whole cache is ever converted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LAYOUTS = ("separate", "packed", "interleaved")
AXES = {
    "separate": ("num_blocks", "block_size", "num_kv_heads", "head_dim"),
    "packed": ("num_blocks", "num_kv_heads", "block_size", "2 * head_dim"),
    "interleaved": ("num_blocks", "block_size", "2 * num_kv_heads", "head_dim"),
}
# Axis of the kv heads, and of the tokens of a page.
HEAD_AXIS = {"separate": 2, "packed": 1, "interleaved": 2}
_TOKEN_AXIS = {"separate": 1, "packed": 2, "interleaved": 1}


class CacheDims(NamedTuple):
    """The dims of a cache, whatever its layout."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


def array_shape(layout: str, dims: CacheDims) -> tuple[int, int, int, int]:
    """Returns the shape of each array of a cache."""
    num_blocks, block_size, num_kv_heads, head_dim = dims
    if layout == "packed":
        return num_blocks, num_kv_heads, block_size, 2 * head_dim
    return num_blocks, block_size, num_kv_heads * (2 if layout == "interleaved" else 1), head_dim


def cache_dims(layout: str, shape: tuple[int, ...]) -> CacheDims:
    """Returns the dims of a cache from the shape of its array(s); leading axes before the last four do not count."""
    num_blocks, block_size, num_kv_heads, head_dim = shape[-4:]
    if layout == "packed":
        num_kv_heads, block_size = block_size, num_kv_heads
    doubled = {"packed": (1, 2), "interleaved": (2, 1)}.get(layout, (1, 1))
    return CacheDims(num_blocks, block_size, num_kv_heads // doubled[0], head_dim // doubled[1])


def split(layout: str, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns K and V [..., chunk, num_kv_heads, head_dim] of chunks in a layout."""
    if layout == "separate":
        return arrays[0], arrays[1]
    if layout == "packed":
        k, v = jnp.split(jnp.swapaxes(arrays[0], -3, -2), 2, axis=-1)
        return k, v
    return arrays[0][..., 0::2, :], arrays[0][..., 1::2, :]


def join(layout: str, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Returns chunks in a layout from K and V [..., chunk, num_kv_heads, head_dim]; undoes `split`."""
    if layout == "separate":
        return k, v
    if layout == "packed":
        return (jnp.swapaxes(jnp.concatenate([k, v], axis=-1), -3, -2),)
    *lead, num_kv_heads, head_dim = k.shape
    return (jnp.stack([k, v], axis=-2).reshape(*lead, 2 * num_kv_heads, head_dim),)


def read_chunks(
    layout: str, arrays: tuple[jax.Array, ...], chunk: int, page: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns K and V [*page.shape, chunk, num_kv_heads, head_dim] of one chunk of tokens of each page.

    Args:
      layout: one of LAYOUTS.
      arrays: those of the cache.
      chunk: tokens that are read at once; divides block_size.
      page: int32[...] in [0, num_blocks).
      place: int32[...] in [0, block_size / chunk); the tokens are [place * chunk, (place + 1) * chunk).
    """
    return split(layout, tuple(_in_chunks(layout, array, chunk)[_at(layout, page, place)] for array in arrays))


def write_tokens(
    layout: str, arrays: tuple[jax.Array, ...], page: jax.Array, offset: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the arrays of a cache with K and V [n, num_kv_heads, head_dim] at token `offset` of each page.

    Args:
      layout: one of LAYOUTS.
      arrays: those of the cache.
      page: int32[n], not negative; a token whose page is not in the pool is not written.
      offset: int32[n] in [0, block_size).
      k: keys.
      v: values.

    Numerics:
      No two tokens should have the same page and offset, also outside the pool; see `write_kv`.
    """
    # The arrays are indexed in the shape that they have: reshaped and back, with one kv head, XLA copies all of them.
    tokens = (jnp.squeeze(token, _TOKEN_AXIS[layout]) for token in join(layout, k[:, None], v[:, None]))
    index = (page, offset)
    if layout == "packed":  # each head has its own index, so that what an index names lies in one piece
        index = (page[:, None], jnp.arange(arrays[0].shape[HEAD_AXIS[layout]])[None], offset[:, None])
    # Without the promise XLA writes 16-bit elements by compare-and-swap, one by one.
    return tuple(
        array.at[index].set(token, mode="drop", unique_indices=True)
        for array, token in zip(arrays, tokens, strict=True)
    )


def _in_chunks(layout: str, array: jax.Array, chunk: int) -> jax.Array:
    """Splits the token axis into (place, chunk): a change of shape, not of memory."""
    axis = _TOKEN_AXIS[layout]
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] // chunk, chunk, *shape[axis + 1 :])


def _at(layout: str, page: jax.Array, place: jax.Array) -> tuple[jax.Array | slice, ...]:
    """Returns the index of a token in an array, or of a chunk in the result of `_in_chunks`.

    The axes of `page` come first in what it picks, also where a slice stands between the two index arrays.
    """
    return (page, slice(None), place) if layout == "packed" else (page, place)
