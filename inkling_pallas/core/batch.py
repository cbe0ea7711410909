"""Batch metadata on the host: what a scheduler knows becomes the arrays of a call, padded to few shapes.

Every shape of a step is part of its compiled program, so a server pads its batches to `Buckets`. What the padding holds
changes no live row: repeated cu_seqlens_q, lengths 0, page 0 and slots -1, as vLLM pads.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.core.buckets import Buckets, Variant, bucket_max_seqlen_q
from inkling_pallas.core.describe import one_line_repr
from inkling_pallas.core.errors import refuse, static_int
from inkling_pallas.core.export import serializable
from inkling_pallas.core.problem import LENGTH_LIMIT

_LAST_SLOT = 2**31 - 1


@serializable
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cu_seqlens_q", "cache_seqlens", "block_table", "slots", "positions"],
    meta_fields=["max_seqlen_q"],
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What a step needs to know of its sequences; a pytree, whose static part is max_seqlen_q and the shapes.

    Attributes:
      cu_seqlens_q: int32[batch_size + 1], row offsets; the last one is repeated for padding.
      cache_seqlens: int32[batch_size], keys of each sequence, those of its rows included; 0 for padding.
      block_table: int32[batch_size, max_blocks], page ids; 0 where there is none.
      slots: int32[num_tokens], where `write_kv` puts each row's key; -1 for padding.
      positions: int32[num_tokens], of each row in its sequence, for `log_scaling`; 0 for padding.
      max_seqlen_q: a power of two.
    """

    cu_seqlens_q: Any
    cache_seqlens: Any
    block_table: Any
    slots: Any
    positions: Any
    max_seqlen_q: int
    __repr__ = one_line_repr

    @property
    def num_tokens(self) -> int:
        """Packed rows, padding included."""
        return self.slots.shape[0]

    @property
    def variant(self) -> Variant:
        """The static sizes."""
        batch_size, max_blocks = self.block_table.shape
        return Variant(self.num_tokens, batch_size, self.max_seqlen_q, max_blocks)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `inkling_rel_attention` that describe a batch, as keywords."""
        names = ("block_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q")
        return {name: getattr(self, name) for name in names}

    def in_layer(self, layer: Any, *, num_blocks: int, block_size: int) -> "Batch":
        """Returns the batch for one layer of a pool that all layers of a kind share, num_blocks pages each.

        Such a pool can be the carry of a `jax.lax.scan` over layers and is written in place, where a stack of caches
        would be taken apart and copied.

        Args:
          layer: int, may be traced; which of them.
          num_blocks: pages of a layer.
          block_size: tokens of a page.
        """
        table, slots = (jnp.asarray(array) for array in (self.block_table, self.slots))
        first_page = jnp.asarray(layer, jnp.int32) * num_blocks
        return dataclasses.replace(
            self,
            block_table=_moved(table, first_page, num_blocks),
            slots=_moved(slots, first_page * block_size, num_blocks * block_size),
        )

    def pad_rows(self, rows: Any) -> np.ndarray:
        """Returns a host array of one entry per live row, such as token ids, with zeros for the padding rows.

        Args:
          rows: array of at most num_tokens entries on axis 0.

        Raises:
          ValueError: if there are more.
        """
        rows = np.asarray(rows)
        missing = self.num_tokens - len(rows)
        if missing < 0:
            rule = f"have at most num_tokens = {self.num_tokens} entries on axis 0"
            raise refuse("rows", rule, len(rows), "It is one entry per row of the batch.")
        return np.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))


def _moved(index: jax.Array, by: jax.Array, size: int) -> jax.Array:
    """Returns the index moved into its layer's part of a pool; one outside the layer must not reach the next one's."""
    return jnp.where((index >= 0) & (index < size), index + by, -1)


def make_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    block_size: int,
    block_tables: Sequence[Sequence[int]] | None = None,
    buckets: Buckets | None = None,
) -> Batch:
    """Returns the metadata of a step, padded to a bucket, as NumPy arrays.

    Args:
      q_lens: rows of each sequence in this step, in the order in which they are packed.
      kv_lens: keys of each sequence after this step, its new rows included.
      block_size: tokens of a page.
      block_tables: page ids of each sequence, at least ceil(kv_len / block_size); where a window has left a page
        behind, its entry may be anything. None gives each sequence pages of its own from page 1 on, for a test or a
        benchmark.
      buckets: what to pad to; None pads each size to a power of two.

    Raises:
      ValueError: for a length outside [0, 2**29], fewer keys than rows, a list of another length, too few pages, a page
        id < 0 where a row is to be written, two rows that would be written to one slot, or a batch that is over the
        last bucket.

    Example:
      >>> import inkling_pallas as ip
      >>> batch = ip.make_batch([3, 1], [3, 20], block_size=16, block_tables=[[7], [2, 5]])
      >>> batch.variant
      Variant(num_tokens=4, batch_size=2, max_seqlen_q=4, max_blocks=2)
      >>> batch.slots.tolist()
      [112, 113, 114, 83]
      >>> batch.positions.tolist()
      [0, 1, 2, 19]
    """
    block_size = static_int("block_size", block_size, 1)
    q_len, kv_len = _lengths("q_lens", q_lens), _lengths("kv_lens", kv_lens)
    if len(q_len) != len(kv_len):
        raise refuse(
            "kv_lens", f"have one entry per entry of q_lens, {len(q_len)}", len(kv_len), "Both are per sequence."
        )
    for b in np.flatnonzero(kv_len < q_len)[:1]:
        advice = "It counts the keys after this step: those before it, and the new rows."
        raise refuse(f"kv_lens[{b}]", f"be at least q_lens[{b}] = {q_len[b]}", kv_len[b], advice)
    tokens = int(q_len.sum())
    if tokens > LENGTH_LIMIT:
        raise refuse("q_lens", f"sum to at most {LENGTH_LIMIT}", tokens, "Schedule less in a step.")
    pages = -(-kv_len // block_size)
    tables = _own_pages(pages) if block_tables is None else _given_pages(block_tables, pages)
    needed = Variant(tokens, len(q_len), int(q_len.max(initial=0)), int(pages.max(initial=0)))
    variant = _powers_of_two(needed) if buckets is None else buckets.fit(needed)
    table = np.zeros((variant.batch_size, variant.max_blocks), np.int32)
    for row, ids in zip(table, tables, strict=False):
        row[: len(ids)] = ids
    offsets = np.concatenate([[0], np.cumsum(q_len)])
    sequence = np.repeat(np.arange(len(q_len)), q_len)
    position = np.arange(tokens) - offsets[sequence] + (kv_len - q_len)[sequence]
    padding = variant.num_tokens - tokens
    return Batch(
        cu_seqlens_q=np.pad(offsets, (0, variant.batch_size - len(q_len)), mode="edge").astype(np.int32),
        cache_seqlens=np.pad(kv_len, (0, variant.batch_size - len(q_len))).astype(np.int32),
        block_table=table,
        slots=np.pad(_slots(table, sequence, position, block_size), (0, padding), constant_values=-1),
        positions=np.pad(position, (0, padding)).astype(np.int32),
        max_seqlen_q=variant.max_seqlen_q,
    )


def _lengths(name: str, values: Sequence[int]) -> np.ndarray:
    return np.array([static_int(f"{name}[{i}]", value, 0, LENGTH_LIMIT) for i, value in enumerate(values)], np.int64)


def _own_pages(pages: np.ndarray) -> list[np.ndarray]:
    """Returns consecutive pages for each sequence; page 0 is left out, being what padding names."""
    ends = 1 + np.cumsum(pages)
    return [np.arange(end - count, end) for end, count in zip(ends, pages, strict=True)]


def _given_pages(block_tables: Sequence[Sequence[int]], pages: np.ndarray) -> list[np.ndarray]:
    """Returns the pages of each sequence that its keys reach."""
    if len(block_tables) != len(pages):
        rule = f"have one entry per entry of q_lens, {len(pages)}"
        raise refuse("block_tables", rule, len(block_tables), "Each is the list of a sequence's page ids.")
    for b, (ids, count) in enumerate(zip(block_tables, pages, strict=True)):
        if len(ids) < count:
            advice = "Allocate the pages of a step's rows before it."
            raise refuse(f"block_tables[{b}]", f"have at least {count} pages, as kv_lens[{b}] needs", len(ids), advice)
    # An id that is no int32 is wrong as it is; it must not wrap around to one that is right.
    return [np.clip(np.asarray(ids[:n], np.int64), -1, _LAST_SLOT) for ids, n in zip(block_tables, pages, strict=True)]


def _powers_of_two(needed: Variant) -> Variant:
    return Variant(*(bucket_max_seqlen_q(size) for size in needed))


def _slots(table: np.ndarray, sequence: np.ndarray, position: np.ndarray, block_size: int) -> np.ndarray:
    """Returns the slot of each live row, each its own."""
    block = position // block_size
    page = table[sequence, block].astype(np.int64)
    slot = page * block_size + position % block_size
    for row in np.flatnonzero((page < 0) | (slot > _LAST_SLOT))[:1]:
        rule = f"be a page id in [0, {_LAST_SLOT // block_size}), for a row of this step is written there"
        where = f"block_tables[{sequence[row]}][{block[row]}]"
        raise refuse(where, rule, int(page[row]), "Only pages that no row writes or sees may be anything.")
    _, first_rows, place = np.unique(slot, return_index=True, return_inverse=True)
    first_row = first_rows[place]  # that has the slot of each row
    for row in np.flatnonzero(first_row != np.arange(len(slot)))[:1]:
        other = first_row[row]
        where = f"block_tables[{sequence[row]}][{block[row]}]"
        rule = f"be another page than block_tables[{sequence[other]}][{block[other]}], for both write slot {slot[row]}"
        raise refuse(where, rule, int(page[row]), "Sequences may share pages that they only read.")
    return slot.astype(np.int32)
