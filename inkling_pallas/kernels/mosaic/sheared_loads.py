"""Tiles of the sheared layout from shared memory, by aligned loads.

A block of a sheared table holds some tokens' rows at the same columns. A token whose row starts 8 keys later has the
keys of a tile 8 columns earlier, so they begin at steps of 8 columns: with `phase` the shift of the first token, those
of token t begin at `8 * ((phase + tokens - 1) // 8 - (phase + t) // 8)`. Rows of the block are (token, head of the
group).

Each piece of inline code stands behind one function here, with a plain-jnp twin for the interpreter.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.core.integers import div
from inkling_pallas.kernels.mosaic import PLAIN, SCALAR, WGMMA, call_inline, result_type
from inkling_pallas.kernels.mosaic.ptx import sheared_loads as ptx_loads


def load_rows(ref: Any, phase: jax.Array, width: int, *, interpret: bool) -> jax.Array:
    """Returns [64, width] in the WGMMA layout: the keys of a tile of each row, the last row repeated.

    Args:
      ref: plain 16-bit SMEM [tokens, group, pitch], at most 64 rows; the pitch is a multiple of 8.
      phase: int32 scalar, 0 to 7.
      width: keys of the tile, a multiple of 16.
      interpret: use the twin.
    """
    if interpret:
        return gather_rows(ref, phase, 64, width)
    code = functools.partial(ptx_loads.load_rows, **shape_of(ref), width=width)
    return call_inline(code, (PLAIN, SCALAR), ref, phase, result=result_type((64, width), ref.dtype, WGMMA))


def load_columns(ref: Any, phase: jax.Array, shape: tuple[int, int], *, interpret: bool) -> jax.Array:
    """Returns [keys, columns] in the WGMMA layout: the keys of a tile of each row, which becomes a column.

    Args:
      ref: as in `load_rows`.
      phase: int32 scalar, 0 to 7.
      shape: keys of the tile, a multiple of 64, and columns, a multiple of 8; those past the rows repeat the last one.
      interpret: use the twin.
    """
    if interpret:
        return gather_rows(ref, phase, shape[1], shape[0]).T
    code = functools.partial(ptx_loads.load_columns, **shape_of(ref), shape=shape)
    return call_inline(code, (PLAIN, SCALAR), ref, phase, result=result_type(shape, ref.dtype, WGMMA))


def shape_of(ref: Any) -> dict[str, int]:
    """Returns the sizes of a block that inline code needs to find its rows."""
    tokens, group, _ = ref.shape
    return {"rows": tokens * group, "group": group, "tokens": tokens}


def gather_rows(ref: Any, phase: jax.Array, count: int, width: int) -> jax.Array:
    """Returns what `load_rows` returns, for `count` rows: the interpreter's twin."""
    tokens, group, pitch = ref.shape
    row = jnp.minimum(lax.iota(jnp.int32, count), tokens * group - 1)
    start = 8 * (div(phase + (tokens - 1), 8) - div(phase + div(row, group), 8))
    column = start[:, None] + lax.broadcasted_iota(jnp.int32, (count, width), 1)
    return ref[...].reshape(-1, pitch)[row[:, None], column]
