"""Results: from registers to global memory. The only writer of outputs and of partial results.

Rows go out straight from registers: eight neighbouring lanes hold eight neighbouring elements of a row, a 32-byte
sector of float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from inkling_pallas.core.integers import div
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.mosaic import tmem_rows, wgmma_rows
from inkling_pallas.kernels.schedule.seq_table import Table
from inkling_pallas.kernels.schedule.tiling import Tiling

RowOf = Callable[[Any], Any]  # row of a tile -> row of the output


def store_columns(ref: Any, x: jax.Array, row_of: RowOf, live: jax.Array, tiling: Tiling) -> None:
    """Writes ref[row_of(c)] = x[:, c] for the first `live` columns of [head_dim, columns] in the WGMMA layout."""
    if tiling.interpret:
        return _store_one_by_one(ref, x.T, row_of, live)
    column = mosaic.iota(x.shape[1:], 0, mosaic.WGMMA_COLUMNS)
    places = jnp.where(column < live, row_of(column), -1)
    return mosaic.scatter_columns(ref, places, x.astype(ref.dtype))


def store_part_of_columns(
    ref: Any, x: jax.Array, first: Any, row_of: RowOf, live: jax.Array, layout: Any, tiling: Tiling
) -> None:
    """Writes ref[row_of(c), first:] = x[:, c] for the first `live` columns of [width, columns] in a strided layout."""
    if tiling.interpret:
        return _store_one_by_one(ref.at[:, pl.ds(first, x.shape[0])], x.T, row_of, live)
    element, column = (mosaic.iota(x.shape, axis, layout) for axis in (0, 1))
    places = jnp.where(column < live, row_of(column), -1)
    return mosaic.scatter(ref, places, first + element, x.astype(ref.dtype), layout=layout)


def store_column_scalars(ref: Any, x: jax.Array, row_of: RowOf, live: jax.Array, layout: Any, tiling: Tiling) -> None:
    """Writes ref[row_of(c), 0] = x[0, c] for the first `live` columns of [width, columns] in a strided layout."""
    if tiling.interpret:
        return _store_one_by_one(ref, x[:1].T, row_of, live)
    element, column = (mosaic.iota(x.shape, axis, layout) for axis in (0, 1))
    places = jnp.where((column < live) & (element == 0), row_of(column), -1)
    return mosaic.scatter(ref, places, jnp.zeros(x.shape, jnp.int32), x, layout=layout)


def store_scalars(
    ref: Any, x: jax.Array, row_of: RowOf, live: jax.Array, tiling: Tiling, layout: Any = mosaic.WGMMA_COLUMNS
) -> None:
    """Writes ref[row_of(i), 0] = x[i] for the first `live` elements of an array in a layout of one axis."""
    if tiling.interpret:
        return _store_one_by_one(ref, x[:, None], row_of, live)
    index = mosaic.iota(x.shape, 0, layout)
    places = jnp.where(index < live, row_of(index), -1)
    return mosaic.scatter(ref, places, jnp.zeros(x.shape, jnp.int32), x, layout=layout)


def store_products(ref: Any, x: jax.Array, row_of: RowOf, live: jax.Array, tiling: Tiling) -> None:
    """Writes ref[row_of(r)] = x[r] for the first `live` rows of [64, head_dim] in the WGMMA layout."""
    if tiling.interpret:
        return _store_one_by_one(ref, x, row_of, live)
    row = mosaic.iota(x.shape[:1], 0, mosaic.WGMMA_ROWS)
    return wgmma_rows.scatter(ref, jnp.where(row < live, row_of(row), -1), x.astype(ref.dtype))


def store_lanes(ref: Any, x: jax.Array, column: int, row_of: RowOf, live: jax.Array, tiling: Tiling) -> None:
    """Writes ref[row_of(r), column:] = x[r] for the first `live` rows of [128, columns], as `tmem_rows` has them."""
    if tiling.interpret:
        return _store_one_by_one(ref.at[:, column : column + x.shape[1]], x, row_of, live)
    row = mosaic.iota(x.shape[:1], 0, tmem_rows.ROWS)
    return tmem_rows.scatter(ref, jnp.where(row < live, row_of(row), -1), x.astype(ref.dtype), column)


def store_rows(ref: Any, x: jax.Array, row_of: RowOf, live: jax.Array, layout: Any, tiling: Tiling) -> None:
    """Writes ref[row_of(r)] = x[r] for the first `live` rows of [rows, width], strided, no vector across rows."""
    if tiling.interpret:
        return _store_one_by_one(ref, x, row_of, live)
    row, element = (mosaic.iota(x.shape, axis, layout) for axis in (0, 1))
    places = jnp.where(row < live, row_of(row), -1)
    return mosaic.scatter(ref, places, element, x.astype(ref.dtype), layout=layout, vectors="neighbours")


def store_row_scalars(ref: Any, x: jax.Array, row_of: RowOf, live: jax.Array, layout: Any, tiling: Tiling) -> None:
    """Writes ref[row_of(r), 0] = x[r, 0] for the first `live` rows of [rows, width] in a strided layout."""
    if tiling.interpret:
        return _store_one_by_one(ref, x[:, :1], row_of, live)
    row, element = (mosaic.iota(x.shape, axis, layout) for axis in (0, 1))
    places = jnp.where((row < live) & (element == 0), row_of(row), -1)
    return mosaic.scatter(ref, places, jnp.zeros(x.shape, jnp.int32), x, layout=layout)


def clear_unowned_rows(out: Any, lse: Any, table: Table, cta: jax.Array, tiling: Tiling) -> None:
    """Writes 0 and -inf to the rows of no sequence: padding past the last, and gaps that bad row offsets leave."""
    problem = tiling.problem
    end = table.at(5, problem.batch_size - 1)
    _clear_rows(out, lse, end, jnp.int32(problem.num_tokens), cta, tiling.num_ctas, tiling)

    @pl.loop(cta, problem.batch_size, step=tiling.num_ctas)
    def _(sequence: jax.Array) -> None:
        before = jnp.where(sequence == 0, 0, table.at(5, jnp.maximum(sequence - 1, 0)))
        stop = jnp.where(table.at(1, sequence) > 0, table.at(0, sequence), before)
        _clear_rows(out, lse, before, stop, 0, 1, tiling)


def _clear_rows(out: Any, lse: Any, begin: jax.Array, end: jax.Array, part: Any, parts: Any, tiling: Tiling) -> None:
    """Clears the packed rows [begin, end), shared among `parts`."""
    shape = (tiling.problem.head_dim, tiling.columns)
    begin, end = begin * tiling.problem.num_heads, end * tiling.problem.num_heads

    @pl.loop(part, div(end - begin + (tiling.columns - 1), tiling.columns), step=parts)
    def _(block: jax.Array) -> None:
        first = begin + block * tiling.columns
        zeros = mosaic.full(shape, 0.0, jnp.float32, mosaic.WGMMA)
        store_columns(out, zeros, lambda r: first + r, end - first, tiling)
        if lse is not None:
            nothing = mosaic.full(shape[1:], -jnp.inf, jnp.float32, mosaic.WGMMA_COLUMNS)
            store_scalars(lse, nothing, lambda r: first + r, end - first, tiling)


def _store_one_by_one(ref: Any, x: jax.Array, row_of: RowOf, live: jax.Array) -> None:
    @pl.loop(0, jnp.minimum(live, x.shape[0]))
    def _(r: jax.Array) -> None:
        ref[row_of(r)] = lax.dynamic_index_in_dim(x, r, keepdims=False).astype(ref.dtype)
