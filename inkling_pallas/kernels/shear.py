"""Kernels that write the sheared layout: `shear` from a plain table, `project` from the relative query in one pass.

The table is cut into tiles of 64 rows, (token, head) in this order, and into chunks of columns. A persistent CTA has
one chunk and every n-th tile: it makes the tile in registers, lays it out in shared memory and has the copy engine
write it, two buffers by turns.

`shear` reads the window of distances of a chunk as it lies and picks each row's columns from it, reversed and shifted.
`project` keeps the projection of its chunk in shared memory with the distances reversed, once for each of the eight
shifts. A row's columns are the product of its relative query with the copy that has its token's shift.

| barrier | arrives | waits | guards |
|---|---|---|---|
| source_ready [stage] | copy of plain rows or of r | the warpgroup | smem.source[stage] |
| proj_ready | eight copies of proj | the warpgroup, once | smem.proj |
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels import mosaic, rows
from inkling_pallas.kernels.shear_tiles import D_REL, ROWS, ShearTiles
from inkling_pallas.sheared import ALIGNMENT


class _Gmem(NamedTuple):
    """Arrays in global memory, rows of one head; `proj` and `tau` are None where the kernel has none."""

    source: Any  # plain rows, or r
    shifts: Any  # int32[1, num_tokens]
    proj: Any  # [shift, column, d_rel]
    tau: Any  # float32[1, num_tokens]


class _Smem(NamedTuple):
    """Buffers of a CTA."""

    source: Any
    out: Any
    proj: Any


class _Barriers(NamedTuple):
    """See the module's table."""

    source_ready: Any
    proj_ready: Any


class _Rows(NamedTuple):
    """The rows of a tile: of which token each is, and that token's shift. int32[64]."""

    token: jax.Array
    shift: jax.Array


def shear(rel_logits: jax.Array, shifts: jax.Array, interpret: Any) -> jax.Array:
    """Returns `sheared.shear_rows(rel_logits, shifts)`.

    Args:
      rel_logits: bf16 or f16 [num_tokens, num_heads, rel_extent], whose extent is a multiple of 8.
      shifts: int32[num_tokens]; -1 in rows of no sequence.
      interpret: a bool or the interpreter's parameters.

    Raises:
      NotImplementedError: for another dtype or extent.
    """
    num_tokens, num_heads, rel_extent = rel_logits.shape
    tiles = ShearTiles.make((num_tokens, num_heads, rel_extent), rel_logits.dtype, bool(interpret))
    source = rel_logits.reshape(tiles.num_rows, tiles.rel_extent)
    if tiles.interpret:  # It does not fill in what lies before an array.
        source = jnp.pad(source, ((0, 0), (tiles.margin, 0)))
    make = functools.partial(_shear_tile, tiles=tiles)
    window = plgpu.SMEM((tiles.num_stages, ROWS, tiles.window), rel_logits.dtype)
    return _launch(make, _Gmem(source, shifts[None], None, None), window, _window_of, tiles, interpret)


def project(r: jax.Array, proj: jax.Array, tau: jax.Array | None, shifts: jax.Array, interpret: Any) -> jax.Array:
    """Returns `sheared.shear_rows(relative_logits(r, proj, tau), shifts)`.

    Args:
      r: bf16 or f16 [num_tokens, num_heads, 16].
      proj: [16, rel_extent] in the dtype of r.
      tau: float32[num_tokens] or None.
      shifts: int32[num_tokens]; -1 in rows of no sequence.
      interpret: a bool or the interpreter's parameters.

    Raises:
      NotImplementedError: for another dtype or d_rel.
    """
    if r.shape[2] != D_REL:
        raise NotImplementedError(f"r must have d_rel = {D_REL}; got {r.shape[2]}. Use backend='portable'.")
    tiles = ShearTiles.make((r.shape[0], r.shape[1], proj.shape[1]), r.dtype, bool(interpret), projects=True)
    by_column = jnp.pad(proj[:, ::-1].T, ((ALIGNMENT, tiles.width - tiles.rel_extent), (0, 0)))
    # A few hundred KB. A copy into a matrix operand starts at multiples of 8 rows, so it cannot shift by itself.
    copies = jnp.stack([by_column[ALIGNMENT - s :][: tiles.width] for s in range(ALIGNMENT)])
    gmem = _Gmem(r.reshape(tiles.num_rows, D_REL), shifts[None], copies, None if tau is None else tau[None])
    make = functools.partial(_project_tile, tiles=tiles)
    queries = plgpu.SMEM((tiles.num_stages, ROWS, D_REL), r.dtype)
    return _launch(make, gmem, queries, _queries_of, tiles, interpret)


def _launch(
    make: Callable[..., jax.Array],
    gmem: _Gmem,
    source: Any,
    place: Callable[..., Any],
    tiles: ShearTiles,
    interpret: Any,
) -> jax.Array:
    """Returns the table [num_tokens, num_heads, width] whose tiles `make` makes from what `place` names."""
    if 0 in (tiles.num_tokens, tiles.num_heads):
        return jnp.zeros(tiles.shape, tiles.dtype)
    inputs = [x for x in gmem if x is not None]

    def write_sheared(*refs: Any, smem: Any, bars: Any) -> None:
        given = iter(refs[:-1])
        _program(make, place, _Gmem(*(None if x is None else next(given) for x in gmem)), refs[-1], smem, bars, tiles)

    copies = mosaic.swizzled_rows((ALIGNMENT, tiles.block, D_REL), tiles.dtype) if tiles.projects else None
    table = mosaic.kernel(
        write_sheared,
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct(tiles.padded_shape, tiles.dtype),
        grid=(tiles.workers, tiles.chunks),
        grid_names=("worker", "chunk"),
        num_threads=1,
        scratch_types={
            "smem": _Smem(source, plgpu.SMEM((2, ROWS, tiles.block), tiles.dtype), copies),
            "bars": _Barriers(
                plgpu.Barrier(num_barriers=tiles.num_stages),
                plgpu.Barrier(num_arrivals=ALIGNMENT) if tiles.projects else None,
            ),
        },
    )(*inputs)
    return table[: tiles.num_rows, : tiles.width].reshape(tiles.shape)


def _program(
    make: Callable[..., jax.Array],
    place: Callable[..., Any],
    gmem: _Gmem,
    table: Any,
    smem: _Smem,
    bars: _Barriers,
    tiles: ShearTiles,
) -> None:
    """The kernel of one CTA. Waits on source_ready and proj_ready."""
    worker, first_column = lax.axis_index("worker"), lax.axis_index("chunk") * tiles.block
    count = lax.div(tiles.num_tiles - worker + (tiles.workers - 1), tiles.workers)

    def fetch(index: jax.Array) -> None:
        stage = lax.rem(index, tiles.num_stages)
        source = place(gmem.source, (worker + index * tiles.workers) * ROWS, first_column, tiles)
        plgpu.copy_gmem_to_smem(source, smem.source.at[stage], bars.source_ready.at[stage])

    if tiles.projects:
        _fetch_projection(gmem.proj, smem.proj, bars.proj_ready, first_column, tiles)
    for i in range(tiles.num_stages - 1):
        pl.when(i < count)(lambda i=i: fetch(jnp.int32(i)))
    if tiles.projects:
        plgpu.barrier_wait(bars.proj_ready)

    @pl.loop(0, count)
    def _(index: jax.Array) -> None:
        following = index + (tiles.num_stages - 1)
        pl.when(following < count)(lambda: fetch(following))
        stage, first_row = lax.rem(index, tiles.num_stages), (worker + index * tiles.workers) * ROWS
        some = _rows_of(gmem.shifts, first_row, tiles)
        plgpu.barrier_wait(bars.source_ready.at[stage])
        tile = make(gmem, smem, stage, first_row, some)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        out = smem.out.at[lax.rem(index, 2)]
        out[...] = tile
        plgpu.commit_smem()  # It also lets the copy engine overwrite the source.
        plgpu.copy_smem_to_gmem(out, table.at[pl.ds(first_row, ROWS), pl.ds(first_column, tiles.block)])

    plgpu.wait_smem_to_gmem(0)


def _rows_of(shifts: Any, first_row: jax.Array, tiles: ShearTiles) -> _Rows:
    """Returns the rows of a tile; those past the last one stand for the last token."""
    row = first_row + mosaic.iota((ROWS,), 0, mosaic.WGMMA_ROWS)
    token = jnp.minimum(tiles.token_of(row), tiles.num_tokens - 1)
    zero = jnp.zeros_like(token)
    return _Rows(token, mosaic.gather(shifts, zero, token, layout=mosaic.WGMMA_ROWS, interpret=tiles.interpret))


def _along_row(x: jax.Array, width: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (*x.shape, width), (0,))


def _window_of(source: Any, first_row: jax.Array, first_column: jax.Array, tiles: ShearTiles) -> Any:
    """Returns the plain rows of a tile at the distances that some shift of a chunk needs: from a multiple of 8 on."""
    lowest = tiles.rel_extent - tiles.block - first_column
    start = lowest + (tiles.margin if tiles.interpret else 0)
    return source.at[pl.ds(first_row, ROWS), pl.ds(start, tiles.window)]


def _shear_tile(
    gmem: _Gmem, smem: _Smem, stage: jax.Array, first_row: jax.Array, some: _Rows, *, tiles: ShearTiles
) -> jax.Array:
    """Returns a tile [64, block] of a plain window: column c is the window's distance block - 1 + shift - c."""
    del gmem, first_row
    row = mosaic.iota((ROWS,), 0, mosaic.WGMMA_ROWS)
    starts = row * tiles.window + jnp.maximum(some.shift, 0) + (tiles.block - 1)
    tile = rows.gather_descending(smem.source.at[stage], starts, tiles.block, interpret=tiles.interpret)
    return jnp.where(_along_row(some.shift >= 0, tiles.block), tile, jnp.zeros_like(tile))


def _queries_of(source: Any, first_row: jax.Array, first_column: jax.Array, tiles: ShearTiles) -> Any:
    """Returns the relative queries of a tile."""
    del first_column, tiles
    return source.at[pl.ds(first_row, ROWS)]


def _fetch_projection(proj: Any, copies: Any, ready: Any, first_column: jax.Array, tiles: ShearTiles) -> None:
    """Starts the copies of a chunk of the projection, one for each shift; each arrives once on `ready`."""
    for shift in range(ALIGNMENT):
        source = proj.at[shift, pl.ds(pl.multiple_of(first_column, ALIGNMENT), tiles.block)]
        plgpu.copy_gmem_to_smem(source, copies.at[shift], ready)


def _project_tile(
    gmem: _Gmem, smem: _Smem, stage: jax.Array, first_row: jax.Array, some: _Rows, *, tiles: ShearTiles
) -> jax.Array:
    """Returns a tile [64, block] of products: for each of its tokens those of its rows, by the copy with its shift."""
    queries = rows.load(smem.source.at[stage], ROWS, D_REL, interpret=tiles.interpret)
    live = some.shift >= 0
    first_token = tiles.token_of(first_row)

    def add_token(index: Any, acc: jax.Array | None) -> jax.Array:
        token = jnp.minimum(first_token + index, tiles.num_tokens - 1)
        shift = jnp.maximum(gmem.shifts[0, token], 0)
        own = _along_row(live & (some.token == token), D_REL)
        kept = jnp.where(own, queries, jnp.zeros_like(queries))
        copy = smem.proj.at[shift]
        return rows.scores_of(kept, copy, start=acc, meanwhile=lambda: None, interpret=tiles.interpret)[0]

    products = add_token(0, None)
    if tiles.tokens_of_tile > 1:
        last = tiles.token_of(jnp.minimum(first_row + ROWS, tiles.num_rows) - 1)
        products = lax.fori_loop(1, last - first_token + 1, add_token, products)
    if gmem.tau is not None:
        zero = jnp.zeros_like(some.token)
        tau = mosaic.gather(gmem.tau, zero, some.token, layout=mosaic.WGMMA_ROWS, interpret=tiles.interpret)
        products = products * _along_row(jnp.where(live, tau, jnp.ones_like(tau)), tiles.block)
    return products.astype(tiles.dtype)
