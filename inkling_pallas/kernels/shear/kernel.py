"""Kernels that write the sheared layout: `shear` from a plain table, `project` from the relative query in one pass.

A tile is 16 rows, (token, head) in this order: a stretch of memory, which the copy engine reads and writes as lines of
256 bytes, whatever the width of a row. Boxes of columns took twice as long: a width is an odd multiple of 16 bytes, so
that every row of a box begins and ends within a sector. A persistent CTA has every n-th tile: it makes the tile in
shared memory and has it written while it makes the next.

`shear` reads the rows of a tile as they lie and turns them round, shifted. `project` keeps the projection in shared
memory with the distances reversed; a row's columns are the product of its relative query with a stretch of it that
begins where the shift of its token says.

| barrier | arrives | waits | guards |
|---|---|---|---|
| source_ready [stage] | copies of plain rows or of r | the warpgroup | smem.source[stage] |
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.devices import H200, Card
from inkling_pallas.core.integers import div, rem
from inkling_pallas.core.sheared_layout import ALIGNMENT
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.mosaic.ptx.sheared_stores import ROWS
from inkling_pallas.kernels.shear import tile_rows
from inkling_pallas.kernels.shear.tile_rows import Tokens
from inkling_pallas.kernels.shear.tiling import ShearTiles


class _Gmem(NamedTuple):
    """Arrays in global memory; `proj` and `tau` are None where the kernel has none."""

    source: Any  # plain rows, or r, as lines
    shifts: Any  # int32[1, num_tokens]
    proj: Any  # [d_rel, rel_extent]
    tau: Any  # float32[1, num_tokens]


class _Smem(NamedTuple):
    """Buffers of a CTA."""

    source: Any  # [stage, lines, line]
    out: Any  # [buffer, lines, line]
    proj: Any  # [half of d_rel, column, 8]


def unsupported(source: Any, rel_extent: int, *, projects: bool, card: Card = H200) -> str | None:
    """Returns why the kernels do not make a table of some extent from `source`, or None if they do.

    Args:
      source: r if `projects`, else rel_logits.
      rel_extent: of the table.
      projects: whether it is `project` that is asked for.
      card: that will run them.
    """
    try:
        ShearTiles.make(source, rel_extent, False, projects=projects, card=card)
    except NotImplementedError as error:
        return str(error)
    return None


def shear(rel_logits: jax.Array, shifts: jax.Array, interpret: Any, card: Card = H200) -> jax.Array:
    """Returns `sheared_layout.shear_rows(rel_logits, shifts)`.

    Args:
      rel_logits: bf16 or f16 [num_tokens, num_heads, rel_extent], whose extent is a multiple of 8.
      shifts: int32[num_tokens]; -1 in rows of no sequence.
      interpret: a bool or the interpreter's parameters.
      card: that will run the kernel.

    Raises:
      NotImplementedError: for another dtype or extent.
    """
    tiles = ShearTiles.make(rel_logits, rel_logits.shape[2], bool(interpret), card=card)

    def make(smem: _Smem, source: Any, out: Any, tokens: Tokens) -> None:
        del smem
        tile_rows.write_turned(out, source, tokens, heads=tiles.num_heads, interpret=tiles.interpret)

    return _launch(make, _Gmem(rel_logits, shifts[None], None, None), tiles, interpret)


def project(
    r: jax.Array, proj: jax.Array, tau: jax.Array | None, shifts: jax.Array, interpret: Any, card: Card = H200
) -> jax.Array:
    """Returns `sheared_layout.shear_rows(relative_logits(r, proj, tau), shifts)`.

    Args:
      r: bf16 or f16 [num_tokens, num_heads, 16].
      proj: [16, rel_extent] in the dtype of r.
      tau: float32[num_tokens] or None.
      shifts: int32[num_tokens]; -1 in rows of no sequence.
      interpret: a bool or the interpreter's parameters.
      card: that will run the kernel.

    Raises:
      NotImplementedError: for another dtype, extent or d_rel.
    """
    tiles = ShearTiles.make(r, proj.shape[1], bool(interpret), projects=True, card=card)

    def make(smem: _Smem, source: Any, out: Any, tokens: Tokens) -> None:
        tile_rows.write_products(out, smem.proj, source, tokens, heads=tiles.num_heads, interpret=tiles.interpret)

    gmem = _Gmem(r, shifts[None], proj, None if tau is None else tau[None])
    return _launch(make, gmem, tiles, interpret)


def _launch(
    make: Callable[[_Smem, Any, Any, Tokens], None], gmem: _Gmem, tiles: ShearTiles, interpret: Any
) -> jax.Array:
    """Returns the table [num_tokens, num_heads, width] whose tiles `make` makes."""
    if 0 in (tiles.num_tokens, tiles.num_heads):
        return jnp.zeros(tiles.shape, tiles.dtype)
    rows = gmem.source.reshape(tiles.num_rows, tiles.source_width)
    rows = jnp.pad(rows, ((0, tiles.padded_rows - tiles.num_rows), (0, 0)))
    (source_lines, source_line), (lines, line) = tiles.lines(tiles.source_width), tiles.lines(tiles.width)
    gmem = gmem._replace(source=rows.reshape(-1, source_line))
    inputs, structure = jax.tree.flatten(gmem)

    def write_sheared(*refs: Any, smem: Any, ready: Any) -> None:
        _program(make, jax.tree.unflatten(structure, refs[:-1]), refs[-1], smem, ready, tiles)

    stages, results = tiles.buffers
    projection = (2, tiles.projection_columns, ALIGNMENT)
    table = mosaic.kernel(
        write_sheared,
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((tiles.padded_rows * tiles.width // line, line), tiles.dtype),
        grid=(tiles.workers,),
        grid_names=("worker",),
        num_threads=1,
        scratch_types={
            "smem": _Smem(
                plgpu.SMEM((stages, source_lines, source_line), tiles.dtype),
                plgpu.SMEM((results, lines, line), tiles.dtype),
                plgpu.SMEM(projection, tiles.dtype) if tiles.projects else None,
            ),
            "ready": plgpu.Barrier(num_arrivals=len(tiles.boxes(tiles.source_width)), num_barriers=stages),
        },
    )(*inputs)
    return table.reshape(-1, tiles.width)[: tiles.num_rows].reshape(tiles.shape)


def _program(
    make: Callable[[_Smem, Any, Any, Tokens], None], gmem: _Gmem, table: Any, smem: _Smem, ready: Any, tiles: ShearTiles
) -> None:
    """The kernel of one CTA. Waits on source_ready."""
    worker = lax.axis_index("worker")
    count = div(tiles.num_tiles - worker + (tiles.workers - 1), tiles.workers)
    stages, results = tiles.buffers

    def fetch(index: jax.Array) -> None:
        stage, tile = rem(index, stages), worker + index * tiles.workers
        for source, place in _pairs(gmem.source, smem.source.at[stage], tile, tiles.source_width, tiles):
            plgpu.copy_gmem_to_smem(source, place, ready.at[stage])

    for i in range(stages - 1):
        pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))
    if tiles.projects:
        _reverse_projection(gmem.proj, smem.proj, tiles)

    @pl.loop(0, count)
    def _(index: jax.Array) -> None:
        following, tile = index + (stages - 1), worker + index * tiles.workers
        pl.when(following < count)(lambda: fetch(following))
        tokens = _tokens_of(gmem, tile * ROWS, tiles)
        stage, buffer = rem(index, stages), rem(index, results)
        plgpu.wait_smem_to_gmem(results - 1, wait_read_only=True)
        plgpu.barrier_wait(ready.at[stage])
        make(smem, smem.source.at[stage], smem.out.at[buffer], tokens)
        plgpu.commit_smem()  # It also lets the copy engine overwrite the source.
        pairs = _pairs(table, smem.out.at[buffer], tile, tiles.width, tiles)
        for i, (target, place) in enumerate(pairs):
            plgpu.copy_smem_to_gmem(place, target, commit_group=i == len(pairs) - 1)

    plgpu.wait_smem_to_gmem(0)


def _pairs(array: Any, buffer: Any, tile: jax.Array, width: int, tiles: ShearTiles) -> list[tuple[Any, Any]]:
    """Returns the parts of a tile in global and in shared memory that one copy takes each."""
    lines, _ = tiles.lines(width)
    first = tile * lines
    boxes = tiles.boxes(width)
    return [(array.at[pl.ds(first + box.start, box.stop - box.start)], buffer.at[box]) for box in boxes]


def _reverse_projection(proj: Any, reversed_proj: Any, tiles: ShearTiles) -> None:
    """Lays out the projection by column: column 8 + c is distance rel_extent - 1 - c, zero where there is none."""
    shape = (tiles.projection_columns, ALIGNMENT)
    layout = mosaic.strided(shape, ALIGNMENT)
    column, element = (mosaic.iota(shape, axis, layout) for axis in (0, 1))
    distance = tiles.rel_extent - 1 + ALIGNMENT - column
    some = (distance >= 0) & (distance < tiles.rel_extent)
    distance = jnp.clip(distance, 0, tiles.rel_extent - 1)
    for half in (0, 1):
        values = mosaic.gather(proj, element + half * ALIGNMENT, distance, layout=layout, interpret=tiles.interpret)
        reversed_proj[half] = jnp.where(some, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _tokens_of(gmem: _Gmem, first_row: jax.Array, tiles: ShearTiles) -> Tokens:
    """Returns whose rows a tile has; those past the last row stand for the last token."""
    first_token = tiles.token_of(first_row)
    tokens = [jnp.minimum(first_token + i, tiles.num_tokens - 1) for i in range(tiles.tokens_of_tile)]
    return Tokens(
        offset=first_row - first_token * tiles.num_heads,
        shifts=[gmem.shifts[0, token] for token in tokens],
        taus=None if gmem.tau is None else [gmem.tau[0, token] for token in tokens],
    )
