"""Cases of caches: any case with its cache in another layout, and rows whose keys and values are yet to be written."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from inkling_pallas.core.cache_layouts import LAYOUTS
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.testing.cases import Case, build, put_in_layout


def in_layout(cases: tuple[Case, ...], layout: str) -> tuple[Case, ...]:
    """Returns the cases with their caches in a layout; write_kv cases, which come in every layout, stay as they are."""
    if layout == "separate":
        return cases
    return tuple(
        case if case.write else dataclasses.replace(case, name=f"{case.name}_{layout}", layout=layout) for case in cases
    )


def write_cases() -> Iterator[Case]:
    """Yields the write_kv cases: repeated pages, rows before the first key, padding, slots to be skipped."""
    for layout, block_size in itertools.product(LAYOUTS, (1, 16)):
        yield Case(
            name=f"write_{layout}_page_{block_size}",
            kind="write_kv",
            q_lens=(5, 1, 33, 4),
            kv_lens=(37, 1, 100, 2),
            block_size=block_size,
            padding_rows=6,
            padding_sequences=2,
            layout=layout,
            write=True,
        )


def small_write_cases() -> Iterator[Case]:
    """Yields one short write_kv case of each layout."""
    for layout in LAYOUTS:
        yield Case(
            name=f"small_write_{layout}",
            kind="write_kv",
            q_lens=(11, 5),
            kv_lens=(200, 75),
            padding_rows=6,
            layout=layout,
            write=True,
        )


def before_write(case: Case) -> tuple[PagedKVCache, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (cache, k, v, slots): a cache that lacks the keys and values of the rows, and what to write into it.

    What is to be written holds poison_value in the cache. Rows that have no place there, padding and those before the
    first key of a sequence, hold poison_value themselves and have a slot that is to be skipped.
    """
    call = build(dataclasses.replace(case, layout="separate"))
    caches = (call["key_cache"], call["value_cache"])
    capacity = len(caches[0]) * case.block_size
    skipped = (-1, capacity, -7, 2**31 - 1, -(2**31), -capacity)
    slots = np.resize(np.array(skipped, np.int64), case.num_tokens).astype(np.int32)
    rows = np.full((2, case.num_tokens, case.num_kv_heads, case.head_dim), case.poison_value).astype(caches[0].dtype)
    for b, end in enumerate(call["cu_seqlens_q"][1:]):
        count = min(case.all_q_lens[b], case.all_kv_lens[b])
        position = case.all_kv_lens[b] - count + np.arange(count)
        page, offset = call["block_table"][b, position // case.block_size], position % case.block_size
        slots[end - count : end] = page * case.block_size + offset
        for row, cache in zip(rows, caches, strict=True):
            row[end - count : end] = cache[page, offset]
            cache[page, offset] = case.poison_value
    return put_in_layout(case.layout, call)["key_cache"], rows[0], rows[1], slots
