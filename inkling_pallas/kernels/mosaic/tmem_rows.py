"""Tiles of tensor memory: 128 query rows, one on each lane. A thread holds the row of its lane.

Each piece of inline code stands behind one function here, with a plain-jnp twin for the interpreter.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels.mosaic import PLAIN, SCALAR, call_inline, result_type, sheared_loads
from inkling_pallas.kernels.mosaic.ptx import tmem_rows as ptx_tmem

LANES = 128  # of tensor memory: the rows of a product, one a thread of the warpgroup that reads it
NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE
ROWS = NATIVE.reduce(1)


def load(ref: Any) -> jax.Array:
    """Returns [128, columns] of tensor memory, once the load is complete."""
    x = plgpu.async_load_tmem(ref, layout=NATIVE)
    plgpu.wait_load_tmem()
    return x


def multiply(ref: Any, factor: jax.Array, *, interpret: bool) -> None:
    """Multiplies [128, columns] of tensor memory by a factor for each row; a warp may do so alone.

    Complete after `plgpu.commit_tmem`.
    """
    x = plgpu.async_load_tmem(ref, layout=NATIVE)
    if interpret:
        plgpu.wait_load_tmem()
    else:  # That one would wait for the whole warpgroup, too.
        call_inline(ptx_tmem.wait_for_loads, ())
    plgpu.async_store_tmem(ref, x * lax.broadcast_in_dim(factor, x.shape, (0,)))


def load_rows(ref: Any, phase: jax.Array, width: int, *, interpret: bool) -> jax.Array:
    """Returns [128, width] in the native layout: the keys of a tile of each row, the last row repeated.

    Rows lie as `sheared_loads` says; a thread reads its own, 16 bytes at a time.

    Args:
      ref: plain 16-bit SMEM [tokens, group, pitch], at most 128 rows; the pitch is a multiple of 8.
      phase: int32 scalar, 0 to 7.
      width: keys of the tile, a multiple of 8.
      interpret: use the twin.
    """
    if interpret:
        return sheared_loads.gather_rows(ref, phase, LANES, width)
    code = functools.partial(ptx_tmem.load_rows, **sheared_loads.shape_of(ref), width=width)
    return call_inline(code, (PLAIN, SCALAR), ref, phase, result=result_type((LANES, width), ref.dtype, NATIVE))


def scatter(ref: Any, rows: jax.Array, x: jax.Array, column: int) -> None:
    """Writes ref[rows[r], column:] = x[r] for rows that are not negative; on the card only.

    Args:
      ref: GMEM [.., width].
      rows: int32[128] in the reduced native layout.
      x: [128, columns] in the native layout, of ref's dtype; a multiple of 16 bytes.
      column: a multiple of 16 bytes.
    """
    call_inline(functools.partial(ptx_tmem.scatter, column=column), (PLAIN, ROWS, NATIVE), ref, rows, x)


def any_below_one(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns whether some row of this warp has x < 1; of float32[128] in the reduced native layout.

    The warps of a warpgroup may differ: what hangs on it must be a warp's own.
    """
    if interpret:
        return (x < 1.0).any()
    return call_inline(ptx_tmem.any_below_one, (ROWS,), x, result=result_type((), jnp.int32, SCALAR)) > 0
