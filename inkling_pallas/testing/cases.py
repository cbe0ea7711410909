"""Workloads as data: a `Case` says the lengths and shapes of a batch, `build` makes its arrays from a seed.

Memory that must not matter is poisoned by default: page 0, unused pages, page tails, keys before the window that no row
  sees, padding
rows and dead entries of the block table hold NaN or garbage.
"""

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np

from inkling_pallas.core.paged_cache import PagedKVCache

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# Places that must not matter, by name; `Case.poison` picks those that hold `Case.poison_value`.
POISON_PLACES = ("page_zero", "unused_pages", "page_tails", "before_window", "padding_rows")
_SPARE_PAGES = 3
# Added to the size of the pool: page ids that lie outside of it.
_OUTSIDE = (0, 3, 2**30)
_SPIKE = 8.0
# Past any cache and negative: a table entry that is never to be used.
_DEAD_ENTRIES = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: q_lens and kv_lens per sequence, everything else as in `inkling_rel_attention`."""

    name: str
    kind: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    rel_extent: int = 128
    window_size: tuple[int, int] = (-1, -1)
    causal: bool = True
    dtype: str = "bfloat16"
    num_splits: int | None = None
    max_seqlen_q: int | None = None  # None: the longest q_len
    padding_rows: int = 0
    padding_sequences: int = 0  # of q_len and kv_len 0, as a bucketed batch has
    parts: int = 1  # compute each sequence in so many parts of its keys, and merge
    spike: int | None = None  # rel_logits are 0 but for +8 at this distance
    absent: int | None = None  # every so-manieth live table entry is outside the pool
    freed_pages: bool = False  # table entries wholly before the window are -1
    layout: str = "separate"  # of the cache; another one makes key_cache a PagedKVCache
    write: bool = False  # the keys and values of the rows are not in the cache yet: write_kv puts them there
    poison: tuple[str, ...] = POISON_PLACES
    poison_value: float = float("nan")
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Packed rows, padding included."""
        return sum(self.q_lens) + self.padding_rows

    @property
    def all_q_lens(self) -> tuple[int, ...]:
        """q_lens with those of padding sequences."""
        return self.q_lens + (0,) * self.padding_sequences

    @property
    def all_kv_lens(self) -> tuple[int, ...]:
        """kv_lens with those of padding sequences."""
        return self.kv_lens + (0,) * self.padding_sequences


def build(case: Case) -> dict[str, Any]:
    """Returns all arguments of `inkling_rel_attention` for a case, q and the caches included, arrays as NumPy."""
    arguments = _build_separate(case)
    return arguments if case.layout == "separate" else put_in_layout(case.layout, arguments)


def _build_separate(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng([case.seed, *map(ord, case.name)])
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    blocks = [-(-kv_len // case.block_size) for kv_len in case.all_kv_lens]
    pool = 1 + sum(blocks) + _SPARE_PAGES
    cache_shape = (pool, case.block_size, case.num_kv_heads, case.head_dim)
    table = _block_table(rng, blocks, pool)
    key_cache, value_cache = normal(*cache_shape), normal(*cache_shape)
    rel_logits = normal(case.num_tokens, case.num_heads, case.rel_extent)
    if case.spike is not None:
        rel_logits[...] = 0
        rel_logits[..., case.spike] = _SPIKE
    arguments = {
        "q": normal(case.num_tokens, case.num_heads, case.head_dim),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": table,
        "cache_seqlens": np.array(case.all_kv_lens, np.int32),
        "cu_seqlens_q": np.concatenate([[0], np.cumsum(case.all_q_lens)]).astype(np.int32),
        "max_seqlen_q": case.max_seqlen_q or max(1, *case.all_q_lens),
        "softmax_scale": 1.0 / case.head_dim,
        "causal": case.causal,
        "window_size": case.window_size,
        "rel_extent": case.rel_extent,
        "rel_logits": rel_logits,
        "num_splits": case.num_splits,
    }
    _poison(case, arguments, blocks)
    return arguments


def _block_table(rng: np.random.Generator, blocks: list[int], pool: int) -> np.ndarray:
    """Returns a table whose live entries are a random permutation of pages 1.. and whose other entries are garbage."""
    width = max(1, *blocks)
    table = np.resize(np.array(_DEAD_ENTRIES, np.int64), (len(blocks), width)).astype(np.int32)
    pages = iter(1 + rng.permutation(pool - 1))
    for row, count in zip(table, blocks, strict=True):
        row[:count] = [next(pages) for _ in range(count)]
    return table


def _poison(case: Case, arguments: dict[str, Any], blocks: list[int]) -> None:
    """Writes poison_value to the chosen places, ids outside the pool to absent and -1 to freed entries, in place."""
    table, value = arguments["block_table"], case.poison_value
    caches = (arguments["key_cache"], arguments["value_cache"])
    live = {int(page) for row, count in zip(table, blocks, strict=True) for page in row[:count]}
    unused = [page for page in range(1, len(caches[0])) if page not in live]
    for cache in caches:
        if "page_zero" in case.poison:
            cache[0] = value
        if "unused_pages" in case.poison:
            cache[unused] = value
        for b in range(len(blocks)):
            _poison_sequence(case, cache, table[b, : blocks[b]], b)
    if "padding_rows" in case.poison:
        for name in ("q", "rel_logits"):
            arguments[name][sum(case.q_lens) :] = value
    if case.absent is not None:
        _take_away(table, blocks, case.absent, caches)
    if case.freed_pages:
        for b in range(len(blocks)):
            table[b, : first_visible_key(case, b) // case.block_size] = -1


def _take_away(table: np.ndarray, blocks: list[int], every: int, caches: tuple[np.ndarray, ...]) -> None:
    """Puts ids outside the pool in place of every so-manieth page of a sequence, which then holds NaN."""
    pool = len(caches[0])
    outside = itertools.cycle([*(pool + past for past in _OUTSIDE), -1, -pool, -(2**31)])
    for row, count in zip(table, blocks, strict=True):
        for place in range(every - 1, count, every):
            for cache in caches:
                cache[row[place]] = np.nan
            row[place] = next(outside)


def first_visible_key(case: Case, b: int) -> int:
    """Returns the oldest key that a row of sequence b sees."""
    left = case.window_size[0]
    return 0 if left == -1 else max(0, case.all_kv_lens[b] - case.all_q_lens[b] - left)


def _poison_sequence(case: Case, cache: np.ndarray, pages: np.ndarray, b: int) -> None:
    """Poisons the tail of the last page and the keys before the window."""
    tail = case.all_kv_lens[b] % case.block_size
    if "page_tails" in case.poison and tail:
        cache[pages[-1], tail:] = case.poison_value
    if "before_window" in case.poison:
        index = np.arange(first_visible_key(case, b))
        cache[pages[index // case.block_size], index % case.block_size] = case.poison_value


def sequence_alone(arguments: dict[str, Any], b: int) -> dict[str, Any]:
    """Returns the call of one sequence of a batch by itself: its rows come first, all else is padding.

    Shapes stay as they are, so that it runs the program that the whole batch runs.
    """
    start, end = (int(x) for x in arguments["cu_seqlens_q"][b : b + 2])
    offsets = np.full_like(arguments["cu_seqlens_q"], end - start)
    offsets[0] = 0
    alone = dict(arguments, cu_seqlens_q=offsets)
    for name in ("q", "rel_logits"):
        alone[name] = np.full_like(arguments[name], np.nan)
        alone[name][: end - start] = arguments[name][start:end]
    for name, dead in (("block_table", -1), ("cache_seqlens", 0), ("kv_offset", 0), ("total_seqlens", 0)):
        if arguments.get(name) is not None:
            alone[name] = np.full_like(arguments[name], dead)
            alone[name][0] = arguments[name][b]
    return alone


def part_of(arguments: dict[str, Any], part: int, parts: int) -> dict[str, Any]:
    """Returns the call over one of `parts` contiguous runs of pages of each sequence, for `merge_partials`.

    The table of the part begins at its first page; what is not its own is garbage there.
    """
    table, cache = arguments["block_table"], arguments["key_cache"]
    block_size = cache.block_size if isinstance(cache, PagedKVCache) else cache.shape[1]
    kv_len = arguments["cache_seqlens"].astype(np.int64)
    blocks = -(-kv_len // block_size)
    first, last = blocks * part // parts, blocks * (part + 1) // parts
    begin = first * block_size
    index = np.minimum(first[:, None] + np.arange(table.shape[1]), table.shape[1] - 1)
    own = np.arange(table.shape[1]) < (last - first)[:, None]
    return dict(
        arguments,
        block_table=np.where(own, np.take_along_axis(table, index, axis=1), -1).astype(np.int32),
        cache_seqlens=np.maximum(0, np.minimum(kv_len, last * block_size) - begin).astype(np.int32),
        kv_offset=begin.astype(np.int32),
        total_seqlens=kv_len.astype(np.int32),
        out_dtype="float32",
        return_lse=True,
    )


def put_in_layout(layout: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns a call of two separate caches with both as one PagedKVCache, in NumPy."""
    keys, values = arguments["key_cache"], arguments["value_cache"]
    if layout == "separate":
        cache = PagedKVCache.separate(keys, values)
    elif layout == "packed":
        cache = PagedKVCache.packed(np.concatenate([keys, values], axis=-1).transpose(0, 2, 1, 3).copy())
    else:
        num_blocks, block_size, num_kv_heads, head_dim = keys.shape
        pairs = np.stack([keys, values], axis=3)
        cache = PagedKVCache.interleaved(pairs.reshape(num_blocks, block_size, 2 * num_kv_heads, head_dim))
    return dict(arguments, key_cache=cache, value_cache=None)
