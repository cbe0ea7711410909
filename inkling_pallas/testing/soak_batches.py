"""Random batches of a fixed shape, made on the device: batch K of seed S is the same on any, whatever ran before.

Every slot of the pool that no row sees holds NaN (in some batches Inf): pages that no table row names, the tails of
pages, keys before a window, those of sequences without rows. So do rows of q and rel_logits that are no sequence's.
Table entries that no row needs are garbage. In part of the batches so are lengths and offsets, or pages are absent.

Memory is drawn as bytes and scaled by powers of two, which gives the same 16-bit floats on every device.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from inkling_pallas.testing.dense import Call, place_rows, seen_keys, slots_of
from inkling_pallas.testing.soak_shapes import Shape

_INT32 = (-(2**31), 2**31 - 1)
_BAD_LENGTHS = (-1, -5, 10**6, 2**29 + 7, *_INT32)
_DEAD_ENTRIES = (-1, 0, 1, 10**6, *_INT32)
# How often a batch has garbage of a sort, and then how many of its numbers are garbage.
_CHANCE_BAD_LENGTHS, _CHANCE_BAD_OFFSETS, _CHANCE_BAD_PARTS = 0.25, 0.3, 0.25
_SHARE_BAD = 0.35
_CHANCE_ABSENT, _SHARE_ABSENT = 0.3, 0.25
_CHANCE_STALE, _SHARE_STALE = 0.25, 0.15
_CHANCE_FREED, _CHANCE_STEEP, _CHANCE_INF = 0.5, 0.25, 0.2


def seed_key(seed: int) -> jax.Array:
    """Returns the key of a seed, of one generator whatever jax is set to."""
    return random.key(seed, impl="threefry2x32")


class _Dice:
    """Deals random words from one draw: a generator inlined for each number would take long to compile."""

    def __init__(self, key: jax.Array, count: int):
        self._words, self._dealt = random.bits(key, (count,), jnp.uint32), 0

    def words(self, *size: int) -> jax.Array:
        """Returns uint32[size]."""
        begin, self._dealt = self._dealt, self._dealt + math.prod(size)
        return self._words[begin : self._dealt].reshape(size)

    def between(self, least: int, most: int, *size: int) -> jax.Array:
        """Returns int32[size] from least to most."""
        return (self.words(*size) % jnp.uint32(most - least + 1)).astype(jnp.int32) + least

    def chance(self, chance: float, *size: int) -> jax.Array:
        """Returns bool[size], true that often."""
        return self.words(*size) < jnp.uint32(int(chance * 2**32))

    def one_of(self, options: Sequence[Any], *size: int) -> jax.Array:
        """Returns int32[size], each element of one of the options, which are int32[size] or numbers."""
        stacked = jnp.stack([jnp.broadcast_to(jnp.asarray(option, jnp.int32), size) for option in options])
        return jnp.take_along_axis(stacked, self.between(0, len(options) - 1, 1, *size), axis=0)[0]

    def memory(self, dtype: str, *size: int) -> jax.Array:
        """Returns floats of [-2, 2], odd multiples of 1/128."""
        count = math.prod(size)
        numbers = jax.lax.bitcast_convert_type(self.words(-(-count // 4)), jnp.uint8).reshape(-1)[:count]
        return ((numbers.astype(jnp.float32) * 2.0 - 255.0) * 2.0**-7).astype(dtype).reshape(size)


def _words_of(shape: Shape) -> int:
    """Returns how many words a batch takes, or some more."""
    pool = shape.num_blocks * shape.block_size * shape.num_kv_heads * shape.head_dim
    rows = shape.num_tokens * shape.num_heads * (shape.head_dim + shape.rel_extent)
    return (2 * pool + rows) // 4 + 16 * (shape.num_blocks + 1) + 64 * (shape.batch_size + 2)


def draw(shape: Shape, key: jax.Array, index: jax.Array) -> Call:
    """Returns the arrays of batch `index`, an int32 scalar; `shape` must be `shape_of(index)`."""
    dice = _Dice(random.fold_in(key, index), _words_of(shape))
    call = _garbled_lengths(shape, dice, _lengths(shape, dice))
    rows = place_rows(shape, call)
    seen = seen_keys(shape, call, rows).any(axis=1)
    call["block_table"] = _table(shape, dice, call, seen)
    slot, present = slots_of(shape, call["block_table"])
    # Slots of keys that some row sees; others are aimed past the pool, where a scatter drops them.
    used = jnp.where(seen & present, slot, shape.num_blocks * shape.block_size)
    live = jnp.zeros(shape.num_blocks * shape.block_size, bool).at[used.ravel()].set(True, mode="drop")
    live = live.reshape(shape.num_blocks, shape.block_size, 1, 1)
    poison = jnp.where(dice.chance(_CHANCE_INF), jnp.inf, jnp.nan).astype(shape.dtype)
    steep = jnp.where(dice.chance(_CHANCE_STEEP), 4.0, 1.0).astype(shape.dtype)
    for name in ("key_cache", "value_cache"):
        numbers = dice.memory(shape.dtype, *live.shape[:2], shape.num_kv_heads, shape.head_dim)
        call[name] = jnp.where(live, numbers, poison)
    owned = (rows.owner >= 0)[:, None, None]
    heads = (shape.num_tokens, shape.num_heads)
    call["q"] = jnp.where(owned, dice.memory(shape.dtype, *heads, shape.head_dim), poison)
    call["rel_logits"] = jnp.where(owned, dice.memory(shape.dtype, *heads, shape.rel_extent) * steep, poison)
    if shape.dirty_out:
        call["out"] = jnp.full((*heads, shape.head_dim), jnp.nan, shape.dtype)
    return call


def _lengths(shape: Shape, dice: _Dice) -> Call:
    """Returns sound lengths: rows of all sequences one after the other, keys at the edges of what kernels cut."""
    size, longest = shape.batch_size, shape.max_seqlen_q
    q_lens = dice.one_of([0, 1, 1, longest, *(dice.between(1, longest, size) for _ in range(4))], size)
    offsets = jnp.minimum(jnp.cumsum(q_lens, dtype=jnp.int32), shape.num_tokens)
    cu_seqlens_q = jnp.concatenate([jnp.zeros((1,), jnp.int32), offsets])
    q_lens, near = jnp.diff(cu_seqlens_q), dice.between(-2, 2, size)
    left = shape.window_size[0] if shape.window_size[0] != -1 else shape.rel_extent
    edges = [
        0,
        shape.capacity,
        dice.between(1, max(1, shape.capacity // 64), size) * 64 + near,
        dice.between(1, shape.max_blocks, size) * shape.block_size + near,
        q_lens + shape.rel_extent + near,
        q_lens + left + near,
        q_lens + near,
    ]
    inner = [dice.between(1, shape.capacity, size) for _ in range(5)]
    kv_lens = jnp.clip(dice.one_of([*edges, *inner], size), 0, shape.capacity)
    call = {"cu_seqlens_q": cu_seqlens_q, "cache_seqlens": kv_lens}
    if shape.parts:
        offset = dice.one_of([0, dice.between(0, 60, size) * shape.block_size, dice.between(0, 5000, size)], size)
        after = dice.one_of([0, 0, dice.between(0, 700, size)], size)
        call |= {"kv_offset": offset, "total_seqlens": offset + kv_lens + after}
    return call


def _garbled_lengths(shape: Shape, dice: _Dice, call: Call) -> Call:
    """Returns the lengths with garbage among them in part of the batches."""
    wild = dice.between(0, shape.num_tokens, shape.batch_size + 1)
    offsets = (wild, wild, wild, -1, shape.num_tokens + 1, -7, *_INT32)
    over = dice.between(shape.capacity + 1, 3 * shape.capacity, shape.batch_size)
    sorts: list[tuple[str, float, Sequence[Any]]] = [
        ("cache_seqlens", _CHANCE_BAD_LENGTHS, (over, *_BAD_LENGTHS)),
        ("cu_seqlens_q", _CHANCE_BAD_OFFSETS, offsets),
        ("kv_offset", _CHANCE_BAD_PARTS, _BAD_LENGTHS),
        ("total_seqlens", _CHANCE_BAD_PARTS, _BAD_LENGTHS),
    ]
    garbled = dict(call)
    for name, chance, values in sorts:
        if name in call:
            size = call[name].size
            bad = dice.chance(chance) & dice.chance(_SHARE_BAD, size)
            garbled[name] = jnp.where(bad, dice.one_of(values, size), call[name])
    return garbled


def _table(shape: Shape, dice: _Dice, call: Call, seen: jax.Array) -> jax.Array:
    """Returns a table of pages that are each one sequence's; what no row needs is garbage, some entries are wrong."""
    size, past = (shape.batch_size, shape.max_blocks), shape.num_blocks
    pages = jnp.argsort(dice.words(shape.num_blocks), stable=True).astype(jnp.int32)
    table = pages[: shape.batch_size * shape.max_blocks].reshape(size)
    other = dice.between(0, past - 1, *size)
    # Ids that another row names as well, or that no row does: the keys there count, once they are named here.
    table = jnp.where(dice.chance(_CHANCE_STALE) & dice.chance(_SHARE_STALE, *size), other, table)
    outside = dice.one_of((-1, -past, past, past + 3, 2**30, *_INT32), *size)
    table = jnp.where(dice.chance(_CHANCE_ABSENT) & dice.chance(_SHARE_ABSENT, *size), outside, table)
    dead = dice.one_of((other, *_DEAD_ENTRIES), *size)
    first_key = jnp.arange(shape.max_blocks, dtype=jnp.int32)[None, :] * shape.block_size
    unneeded = ~seen.reshape(*size, shape.block_size).any(axis=2) & dice.chance(_CHANCE_FREED)
    return jnp.where(unneeded | (first_key >= call["cache_seqlens"][:, None]), dead, table)
