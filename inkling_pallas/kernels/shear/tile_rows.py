"""How a tile of a sheared table is written in shared memory: 16 rows, (token, head), one after the other.

Each piece of inline code stands behind one function here, with a plain-jnp twin for the interpreter.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.core.integers import div
from inkling_pallas.core.sheared_layout import ALIGNMENT
from inkling_pallas.kernels.mosaic import PLAIN, SCALAR, call_inline
from inkling_pallas.kernels.mosaic.ptx import sheared_stores as ptx_stores
from inkling_pallas.kernels.mosaic.ptx.sheared_stores import ROWS


class Tokens(NamedTuple):
    """Whose rows a tile has.

    `offset` rows of the first token stand in tiles before; `shifts` and `taus` (or None) are scalars of it and of those
    that follow.
    """

    offset: jax.Array
    shifts: list[jax.Array]
    taus: list[jax.Array] | None


def write_products(out: Any, proj: Any, queries: Any, tokens: Tokens, *, heads: int, interpret: bool) -> None:
    """Writes column c of a row as its relative query times `proj` at 8 - shift + c, times tau; 0 where shift is -1.

    Args:
      out: plain 16-bit SMEM that holds [16, width] in order; the width is a multiple of 8, at least 16.
      proj: plain SMEM [2, columns, 8]: halves of d_rel, at least width + 8 columns.
      queries: plain SMEM that holds [16, 16] in order.
      tokens: of the tile.
      heads: rows of a token.
      interpret: use the twin.
    """
    taus = tokens.taus or []
    if not interpret:
        code = functools.partial(ptx_stores.write_products, tokens=len(tokens.shifts), heads=heads)
        scalars = (tokens.offset, *tokens.shifts, *taus)
        call_inline(code, (PLAIN,) * 3 + (SCALAR,) * len(scalars), out, proj, queries, *scalars)
        return
    ordinal, shift = _ordinals(tokens, heads)
    by_column = proj[...].transpose(1, 0, 2).reshape(-1, 2 * ALIGNMENT)
    columns = lax.broadcasted_iota(jnp.int32, (ROWS, _row_length(out)), 1)
    picked = by_column[ALIGNMENT - jnp.maximum(shift, 0)[:, None] + columns]
    rows = queries[...].reshape(ROWS, 1, -1)
    products = (rows.astype(jnp.float32) * picked.astype(jnp.float32)).sum(axis=2)
    if taus:
        products = products * jnp.stack(taus)[ordinal][:, None]
    result = jnp.where(shift[:, None] >= 0, products, jnp.zeros_like(products))
    out[...] = result.astype(out.dtype).reshape(out.shape)


def write_turned(out: Any, source: Any, tokens: Tokens, *, heads: int, interpret: bool) -> None:
    """Writes column c of a row as its distance rel_extent - 1 + shift - c; 0 where there is none or shift is -1.

    Args:
      out: as in `write_products`.
      source: plain SMEM that holds [16, rel_extent] in order.
      tokens: of the tile.
      heads: rows of a token.
      interpret: use the twin.
    """
    if not interpret:
        code = functools.partial(ptx_stores.write_turned, heads=heads)
        scalars = (tokens.offset, *tokens.shifts)
        call_inline(code, (PLAIN,) * 2 + (SCALAR,) * len(scalars), out, source, *scalars)
        return
    _, shift = _ordinals(tokens, heads)
    extent = _row_length(source)
    columns = lax.broadcasted_iota(jnp.int32, (ROWS, _row_length(out)), 1)
    distance = extent - 1 + jnp.maximum(shift, 0)[:, None] - columns
    rows = source[...].reshape(ROWS, extent)
    turned = jnp.take_along_axis(rows, jnp.clip(distance, 0, extent - 1), axis=1)
    some = (shift[:, None] >= 0) & (distance >= 0) & (distance < extent)
    out[...] = jnp.where(some, turned, jnp.zeros_like(turned)).reshape(out.shape)


def _row_length(ref: Any) -> int:
    return ref.size // ROWS


def _ordinals(tokens: Tokens, heads: int) -> tuple[jax.Array, jax.Array]:
    """Returns of which token of the tile each row is, and its shift."""
    ordinal = div(tokens.offset + lax.iota(jnp.int32, ROWS), heads)
    return ordinal, jnp.stack(tokens.shifts)[ordinal]
