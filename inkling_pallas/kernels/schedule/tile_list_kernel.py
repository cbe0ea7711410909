"""The kernel that makes the prefill kernel's list of tiles from the caller's lengths, a thread an item.

An item's place is the number of items that come before it: of each sequence it is known without looking at its items,
since later rows never see fewer keys. So nothing is sorted, and every CTA makes its own part of the list.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from inkling_pallas.core.integers import div
from inkling_pallas.core.problem import Lengths, Sequences
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.schedule import seq_table, split_kv
from inkling_pallas.kernels.schedule.seq_table import Table, keep_taken
from inkling_pallas.kernels.schedule.tile_list import ITEM_WORDS, Item, Worklist
from inkling_pallas.kernels.schedule.tiling import RowTiling

_THREADS = mosaic.THREADS
_LAYOUT = mosaic.strided((_THREADS,))


def make_worklist(lengths: Lengths, tiling: RowTiling, interpret: Any) -> Worklist:
    """Returns the list for a batch: sequences of other kernels have no items, but their rows in the table."""
    sources, structure = jax.tree.flatten(lengths)
    batch, blocks = tiling.problem.batch_size, -(-tiling.max_items // _THREADS)

    def list_items(*refs: Any) -> None:
        mosaic.wait_for_previous_kernel(interpret=tiling.interpret)
        mosaic.let_next_kernel_launch(interpret=tiling.interpret)
        *given, items, table_gmem, table_smem = refs
        words = seq_table.fill(jax.tree.unflatten(structure, given), table_smem, _count_items_of(tiling), tiling)
        block = lax.axis_index("block")
        _write_items(items, words, table_smem, block, tiling)
        pl.when(block == 0)(lambda: _copy_table(table_gmem, table_smem, tiling))

    return Worklist(
        *mosaic.kernel(
            list_items,
            interpret=interpret,
            out_type=[
                jax.ShapeDtypeStruct((blocks * _THREADS, ITEM_WORDS), jnp.int32),
                jax.ShapeDtypeStruct((seq_table.ROWS, batch), jnp.int32),
            ],
            grid=(blocks,),
            grid_names=("block",),
            num_threads=1,
            scratch_types=[seq_table.smem_type(tiling)],
        )(*sources)
    )


def _count_items_of(tiling: RowTiling) -> seq_table.Work:
    def count_items(sequence: Sequences) -> tuple[Sequences, jax.Array]:
        rows = keep_taken(sequence, tiling)
        return sequence, div(rows + (tiling.tile_tokens - 1), tiling.tile_tokens)

    return count_items


def _write_items(items: Any, words: Table, table_smem: Any, block: jax.Array, tiling: RowTiling) -> None:
    """Writes the items that this CTA's threads have to their places."""
    index = block * _THREADS + mosaic.iota((_THREADS,), 0, _LAYOUT)
    of_threads = Table(lambda row, sequences: _gather(table_smem, row, sequences, tiling))
    sequence = of_threads.find(index, tiling.problem.batch_size)
    number = index - of_threads.work_before(sequence)
    facts = of_threads.facts(sequence)
    item = item_of(facts, sequence, number, tiling)
    place = _place_of(words, facts, item, number, tiling)
    place = jnp.where(index < words.at(4, tiling.problem.batch_size - 1), place, -1)
    for column, word in enumerate(item):
        _scatter(items, place, jnp.full_like(place, column), word, tiling)


def item_of(facts: Sequences, sequence: jax.Array, block: jax.Array, tiling: RowTiling) -> Item:
    """Returns block `block` of the rows of a sequence as an item, element by element."""
    window_left = tiling.problem.window_left
    start, q_len, kv_len, first_pos = facts
    skipped = block * tiling.tile_tokens
    tokens = jnp.clip(q_len - skipped, 0, tiling.tile_tokens)
    first_tile, tiles = split_kv.tile_range(
        kv_len, tokens, first_pos + skipped, block_kv=tiling.block_kv, window_left=window_left
    )
    clean_begin, clean_end = _clean_keys(kv_len, q_len, tokens, first_pos, skipped, tiling)
    return Item(
        sequence=sequence,
        row=start + skipped,
        tokens=tokens,
        kv_len=kv_len,
        first_pos=first_pos + skipped,
        first_tile=first_tile,
        tiles=tiles,
        clean_begin=clean_begin,
        clean_end=clean_end,
    )


def _clean_keys(
    kv_len: jax.Array, q_len: jax.Array, tokens: jax.Array, first_pos: jax.Array, skipped: jax.Array, tiling: RowTiling
) -> tuple[jax.Array, jax.Array]:
    """Returns [begin, end) of the keys of an item that come from finite memory.

    All that rows of the sequence see do. But chunks that the item needs none of are copies of its first or last, and
    where those are one chunk, it may hold the keys at an end of the sequence, and dead ones past them.
    """
    window_left = tiling.problem.window_left
    begin, end = split_kv.live_keys(kv_len, q_len, first_pos, window_left=window_left)
    first, stop = split_kv.live_keys(kv_len, tokens, first_pos + skipped, window_left=window_left)
    alone = div(first, tiling.chunk) >= div(jnp.maximum(stop, 1) - 1, tiling.chunk)
    return jnp.where(alone, first, begin), jnp.where(alone, stop, end)


def _longest(tiling: RowTiling) -> int | None:
    """Returns the length from which on items under a window count as equal: most are, give or take a tile."""
    window_left = tiling.problem.window_left
    return None if window_left is None else (window_left + tiling.tile_tokens) // tiling.block_kv + 1


def _length_of(item: Item, tiling: RowTiling) -> jax.Array:
    """Returns what the list is sorted by: KV tiles from key 0 on, as far as the window reaches."""
    length, longest = item.first_tile + item.tiles, _longest(tiling)
    return length if longest is None else jnp.minimum(length, longest)


def _place_of(words: Table, facts: Sequences, item: Item, block: jax.Array, tiling: RowTiling) -> jax.Array:
    """Returns how many items come before one: longer ones, and as long ones of the rows before."""
    length = _length_of(item, tiling)

    def add(other: jax.Array, place: jax.Array) -> jax.Array:
        blocks = words.at(4, other) - words.work_before(other)
        at_most = jnp.where(other < item.sequence, length - 1, length)
        return place + blocks - _count_up_to(at_most, words.facts(other), blocks, tiling)

    shorter = _count_up_to(length - 1, facts, block, tiling)
    return lax.fori_loop(0, tiling.problem.batch_size, add, block - shorter)


def _count_up_to(length: jax.Array, facts: Sequences, blocks: jax.Array, tiling: RowTiling) -> jax.Array:
    """Returns how many of the first `blocks` items of a sequence are at most so long."""
    keys, longest = length * tiling.block_kv, _longest(tiling)
    fitting = div(jnp.maximum(keys - facts.first_pos, 0), jnp.full_like(keys, tiling.tile_tokens))
    all_fit = (facts.kv_len <= keys) | (facts.first_pos + facts.q_len <= keys)
    if longest is not None:
        all_fit = all_fit | (length >= longest)
    return jnp.where(length > 0, jnp.where(all_fit, blocks, jnp.minimum(fitting, blocks)), 0)


def _copy_table(table_gmem: Any, table_smem: Any, tiling: RowTiling) -> None:
    """Copies the table out, for the prefill kernel to read."""
    batch = tiling.problem.batch_size

    @pl.loop(0, -(-batch // _THREADS))
    def _(group: jax.Array) -> None:
        column = group * _THREADS + mosaic.iota((_THREADS,), 0, _LAYOUT)
        for row in range(seq_table.ROWS):
            word = _gather(table_smem, row, jnp.minimum(column, batch - 1), tiling)
            _scatter(table_gmem, jnp.where(column < batch, jnp.int32(row), -1), column, word, tiling)


def _gather(ref: Any, row: int, columns: jax.Array, tiling: RowTiling) -> jax.Array:
    rows = jnp.full_like(columns, row)
    return mosaic.gather(ref, rows, columns, layout=_LAYOUT, interpret=tiling.interpret)


def _scatter(ref: Any, rows: jax.Array, columns: jax.Array, words: jax.Array, tiling: RowTiling) -> None:
    """Writes ref[rows, columns] = words, skipping negative rows."""
    if not tiling.interpret:
        mosaic.scatter(ref, rows, columns, words, layout=_LAYOUT)
        return

    @pl.loop(0, _THREADS)
    def _(i: jax.Array) -> None:
        @pl.when(rows[i] >= 0)
        def _() -> None:
            ref[rows[i], columns[i]] = words[i]
