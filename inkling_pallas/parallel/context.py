"""Cutting sequences into contiguous parts, one for each device: page tables and lengths of every part, on the host."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.core.describe import one_line_repr
from inkling_pallas.core.errors import refuse, static_int
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.core.problem import LENGTH_LIMIT


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["block_table", "cache_seqlens", "kv_offset", "total_seqlens", "capacity"],
    meta_fields=["block_size"],
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextShards:
    """The parts of each sequence of a batch; a pytree. Make one with `cut_context`.

    The operator has one `kv_offset` per sequence, so a part is a contiguous run of pages. New keys of a growing
    sequence all lie in the last part: that device's work grows and the others' does not. After a sequence of n keys has
    grown by g, the last of d devices has n / d + g keys, where a new cut gives (n + g) / d. A new cut copies pages, so
    it is for when the last part has become much longer, not for every step.

    Attributes:
      block_table: int32[num_shards, batch, max_blocks], page ids in a part's own pool.
      cache_seqlens: int32[num_shards, batch], keys of each part.
      kv_offset: int32[num_shards, batch], position of the first key of each part.
      total_seqlens: int32[batch], keys of the whole sequence.
      capacity: int32[num_shards, batch], keys that a part's pages can hold.
      block_size: tokens of a page.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("block_table", "cache_seqlens", "kv_offset", "total_seqlens")

    block_table: Any
    cache_seqlens: Any
    kv_offset: Any
    total_seqlens: Any
    capacity: Any
    block_size: int
    __repr__ = one_line_repr

    @property
    def num_shards(self) -> int:
        """Parts of each sequence."""
        return self.block_table.shape[0]

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the operator that describe the parts, each with its parts on axis 0."""
        return {name: getattr(self, name) for name in self.NAMES}

    def grown(self, total_seqlens: Sequence[int]) -> "ContextShards":
        """Returns the parts of sequences that have other lengths now, in the same pages: no key moves.

        Args:
          total_seqlens: keys of each whole sequence.

        Raises:
          ValueError: for another number of lengths, one below 0 or one that the last part cannot hold.
        """
        total = _per_sequence("total_seqlens", total_seqlens, self.block_table.shape[1], -LENGTH_LIMIT)
        room = np.asarray(self.kv_offset[-1], np.int64) + self.capacity[-1]
        for b in np.flatnonzero((total < 0) | (total > room))[:1]:
            rule = f"lie in [0, {room[b]}], the keys that its parts have pages for"
            raise refuse(f"total_seqlens[{b}]", rule, int(total[b]), "Growth needs spare_blocks, or a new cut.")
        held = np.clip(total - self.kv_offset, 0, self.capacity)
        return dataclasses.replace(self, cache_seqlens=held.astype(np.int32), total_seqlens=total.astype(np.int32))

    def slots(self, q_lens: Sequence[int]) -> np.ndarray:
        """Returns where each part writes the last q_lens keys of each sequence; -1 for what is another part's.

        Args:
          q_lens: new rows of each sequence, in the order in which they are packed.

        Returns:
          int32[num_shards, num_tokens].

        Raises:
          ValueError: for another number of q_lens, or a negative one.
        """
        lengths = _per_sequence("q_lens", q_lens, self.block_table.shape[1])
        rows = [np.arange(total - q, total) for total, q in zip(self.total_seqlens, lengths, strict=True)]
        sequence = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        local = np.concatenate([np.zeros(0, np.int64), *rows]) - self.kv_offset[:, sequence]
        mine = (local >= 0) & (local < self.capacity[:, sequence])
        block = np.where(mine, local // self.block_size, 0)
        page = self.block_table[np.arange(self.num_shards)[:, None], sequence, block]
        return np.where(mine, page * self.block_size + local % self.block_size, -1).astype(np.int32)


def _per_sequence(name: str, values: Sequence[int], batch: int, minimum: int = 0) -> np.ndarray:
    """Returns lengths after checking that each sequence has one."""
    if np.shape(values) != (batch,):
        rule = f"have one entry per sequence that was cut, shape ({batch},)"
        raise refuse(name, rule, np.shape(values), "Cut the batch anew where sequences came or went.")
    return np.array(
        [static_int(f"{name}[{b}]", n, minimum) for b, n in enumerate(np.asarray(values).tolist())], np.int64
    )


def cut_context(
    block_tables: Sequence[Sequence[int]],
    kv_lens: Sequence[int],
    *,
    num_shards: int,
    block_size: int,
    spare_blocks: int = 0,
) -> tuple[ContextShards, np.ndarray]:
    """Returns the parts of each sequence, equal to one page, and which page of a whole pool each page of a part is.

    Args:
      block_tables: page ids of each sequence in the whole pool, at least ceil(kv_len / block_size). A negative one
        is of no page, such as one freed behind a window, and stays so.
      kv_lens: keys of each sequence.
      num_shards: devices to cut for.
      block_size: tokens of a page.
      spare_blocks: pages of the last part of each sequence beyond what it needs now, for growth.

    Returns:
      (shards, pages): NumPy arrays; pages is int32[num_shards, pages of a part's pool], page 0 of a part and spare ones
      naming page 0. `take_pages` makes the pool.

    Raises:
      ValueError: for a wrong number, or too few pages for a sequence.

    Example:
      >>> shards, pages = cut_context([[7, 2, 5, 3]], [50], num_shards=2, block_size=16)
      >>> shards.kv_offset.tolist(), shards.cache_seqlens.tolist(), pages.tolist()
      ([[0], [32]], [[32], [18]], [[0, 7, 2], [0, 5, 3]])
    """
    num_shards, block_size = static_int("num_shards", num_shards, 1), static_int("block_size", block_size, 1)
    spare_blocks = static_int("spare_blocks", spare_blocks, 0)
    blocks = np.array(
        [-(-static_int(f"kv_lens[{b}]", n, 0, LENGTH_LIMIT) // block_size) for b, n in enumerate(kv_lens)], np.int64
    )
    if len(block_tables) != len(blocks):
        rule = f"have one entry per entry of kv_lens, {len(blocks)}"
        raise refuse("block_tables", rule, len(block_tables), "Each is the list of a sequence's page ids.")
    for b, (ids, count) in enumerate(zip(block_tables, blocks, strict=True)):
        if len(ids) < count:
            raise refuse(f"block_tables[{b}]", f"have at least {count} pages", len(ids), "kv_lens needs them.")
    first = np.arange(num_shards + 1)[:, None] * blocks // num_shards
    spare = np.zeros((num_shards, 1), np.int64)
    spare[-1] = spare_blocks
    counts = np.diff(first, axis=0) + spare
    ends = np.cumsum(counts, axis=1)
    table = np.zeros((num_shards, len(blocks), max(1, counts.max(initial=0))), np.int32)
    pages = np.zeros((num_shards, 1 + ends.max(initial=0)), np.int32)
    for shard, b in np.ndindex(*counts.shape):
        count = int(counts[shard, b])
        begin = 1 + int(ends[shard, b]) - count
        own = np.asarray(block_tables[b][first[shard, b] : first[shard + 1, b]], np.int64)
        table[shard, b, :count] = np.arange(begin, begin + count)
        table[shard, b, : len(own)][own < 0] = -1
        pages[shard, begin : begin + len(own)] = np.maximum(own, 0)
    shards = ContextShards(
        block_table=table,
        cache_seqlens=np.zeros_like(counts, np.int32),
        kv_offset=(first[:-1] * block_size).astype(np.int32),
        total_seqlens=np.zeros(len(blocks), np.int32),
        capacity=(counts * block_size).astype(np.int32),
        block_size=block_size,
    )
    return shards.grown(kv_lens), pages


def take_pages(cache: PagedKVCache, pages: np.ndarray) -> PagedKVCache:
    """Returns the pools of all parts, one after the other, from a whole pool: a copy, for setting up and for a new cut.

    Args:
      cache: the whole pool.
      pages: int32[num_shards, pages of a part's pool] from `cut_context`.

    Raises:
      ValueError: for a page outside the pool.

    Example:
      >>> cache = PagedKVCache.zeros(num_blocks=9, block_size=16, num_kv_heads=1, head_dim=64)
      >>> shards, pages = cut_context([[7, 2, 5, 3]], [50], num_shards=2, block_size=16)
      >>> take_pages(cache, pages).num_blocks
      6
    """
    wrong = np.argwhere((pages < 0) | (pages >= cache.num_blocks))
    for place in wrong[:1]:
        rule = f"lie in [0, {cache.num_blocks}), the pages of the pool"
        advice = "A table given to `cut_context` names a page that this pool lacks."
        raise refuse(f"pages[{', '.join(map(str, place))}]", rule, int(pages[tuple(place)]), advice)
    return jax.tree.map(lambda array: jnp.asarray(array)[pages.ravel()], cache)
