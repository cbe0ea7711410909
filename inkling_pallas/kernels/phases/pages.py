"""KV tiles: from pages to shared memory. The only reader of the block table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.integers import div, rem
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.schedule import split_kv
from inkling_pallas.kernels.schedule.split_kv import Piece
from inkling_pallas.kernels.schedule.tiling import Tiling

# Row and column of a word in shared memory.
Place = tuple[Any, Any]
# Where parts of a KV tile lie: (page, chunk of the page) each.
Chunks = list[tuple[jax.Array, jax.Array]]


def split_pages(cache: jax.Array, tiling: Tiling) -> jax.Array:
    """Returns a view of a cache with the tokens of a page cut into chunks: one more axis, before that of the tokens."""
    axis = 2 if tiling.problem.layout == "packed" else 1
    shape = (*cache.shape[:axis], cache.shape[axis] // tiling.chunk, tiling.chunk, *cache.shape[axis + 1 :])
    return cache.reshape(shape)


def _chunk_of(cache: Any, page: Any, place: Any, head: Any, values: bool, tiling: Tiling) -> Any:
    """Returns the ref [chunk, head_dim] of one kv head's keys or values in any layout."""
    problem = tiling.problem
    if problem.layout == "packed":
        start = problem.head_dim if values else 0
        return cache.at[page, head, place, :, start : start + problem.head_dim]
    if problem.layout == "interleaved":
        head = 2 * head + (1 if values else 0)
    return cache.at[page, place, :, head]


def prefetch_table(block_table: Any, part: jax.Array, tiling: Tiling) -> None:
    """Asks for a part of the block table in L2, so that the first page ids come from there."""
    mosaic.prefetch_part(block_table, part, interpret=tiling.interpret)


def find_chunks(block_table: Any, piece: Piece, tile: jax.Array, tiling: Tiling) -> Chunks:
    """Returns where the keys of a KV tile lie; a page id is what the table holds.

    A chunk without a key that some row sees is replaced by the nearest one with such keys, which the cache has at hand.
    """
    chunks_per_tile = tiling.block_kv // tiling.chunk
    chunks_per_page = tiling.problem.block_size // tiling.chunk
    begin, end = split_kv.live_keys(piece.kv_len, piece.tokens, piece.first_pos, window_left=tiling.problem.window_left)
    last = div(jnp.maximum(end, 1) - 1, tiling.chunk)
    first = jnp.minimum(div(begin, tiling.chunk), last)
    chunks = [jnp.clip(tile * chunks_per_tile + i, first, last) for i in range(chunks_per_tile)]
    pages = [block_table[piece.sequence, div(chunk, chunks_per_page)] for chunk in chunks]
    return [(page, rem(chunk, chunks_per_page)) for page, chunk in zip(pages, chunks, strict=True)]


def note_absent(notes_smem: Any, place: Place, chunks: Chunks, tiling: Tiling) -> None:
    """Leaves which chunks of a tile have a page id outside the pool, bit i for chunk i (at most 16); for one warp.

    Whoever waits for the copies of the same warp reads it after them.
    """
    bits = [jnp.where(_is_page(page, tiling), 0, 1 << i).astype(jnp.int32) for i, (page, _) in enumerate(chunks)]
    mosaic.write_word(notes_smem, *place, functools.reduce(jnp.bitwise_or, bits), interpret=tiling.interpret)


def notes_type(tiling: Tiling, slots: int) -> Any:
    """Returns the notes of some slots as a scratch type."""
    return plgpu.SMEM((1, slots), jnp.int32)


def absent_chunks(notes_smem: Any, place: Place, tiling: Tiling) -> jax.Array:
    """Returns the note of a tile, int32."""
    return mosaic.read_word(notes_smem, *place, interpret=tiling.interpret)


def _is_page(page: jax.Array, tiling: Tiling) -> jax.Array:
    return (page >= 0) & (page < tiling.problem.num_blocks)


def fetch_tile(
    cache: Any,
    chunks: Chunks,
    tile_smem: Any,
    ready: Any,
    head: jax.Array,
    tiling: Tiling,
    *,
    values: bool,
) -> None:
    """Starts the copies of one KV tile from `find_chunks`; each arrives once on `ready`.

    Of a page id outside the pool come zeros, which is what the copy engine fills in past the end of an array: nothing
    of another sequence. `note_absent` has its keys masked. The CTAs of a cluster copy a part each, to all of them.
    """
    for i, (page, chunk) in enumerate(chunks):
        page = jnp.where(_is_page(page, tiling), page, tiling.problem.num_blocks)
        source = _chunk_of(cache, page, chunk, head, values, tiling)
        place = tile_smem.at[slice(i * tiling.chunk, (i + 1) * tiling.chunk)]
        plgpu.copy_gmem_to_smem(source, place, ready, collective_axes=tiling.cluster_axis)


def clear_dead_rows(tile_smem: Any, begin: jax.Array, end: jax.Array, tiling: Tiling) -> None:
    """Writes zeros over the rows of a V tile outside [begin, end).

    What a page holds there may be NaN, and 0 * NaN is NaN.
    """
    mosaic.clear_rows_outside(tile_smem, begin, end, interpret=tiling.interpret)
    plgpu.commit_smem()
