"""What `mosaic` is for tiles whose rows are query rows: products from registers, masks, turns on the tensor core.

Each piece of inline code stands behind one function here, with a plain-jnp twin for the interpreter.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels.mosaic import PLAIN, SCALAR, WGMMA, WGMMA_ROWS, call_inline, result_type
from inkling_pallas.kernels.mosaic.ptx import wgmma_rows as ptx_rows

_PLGPU: Any = plgpu  # Its type stubs lack some public names.


def _product(x: jax.Array, b: Any, *, transposed: bool) -> jax.Array:
    """Returns the interpreter's x @ b: it has no product whose left operand is in registers."""
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    product = lax.dot_general(x, b[...], dims, preferred_element_type=jnp.float32)
    plgpu.commit_smem()  # It read b as threads do; on the card the matrix unit does.
    return product


def scores_of(
    x: jax.Array, keys: Any, *, start: jax.Array | None, meanwhile: Callable[[], Any], interpret: bool
) -> tuple[jax.Array, Any]:
    """Returns start + x @ keys.T and what `meanwhile` returns, which runs while the product does.

    Args:
      x: 16-bit[64, head_dim] in the WGMMA layout.
      keys: [keys, head_dim] in SMEM, a matrix operand.
      start: float32[64, keys] in the WGMMA layout, or None for zeros; with it `meanwhile` must return nothing.
      meanwhile: runs after the product was issued.
      interpret: use the twin.
    """
    if interpret:
        product = _product(x, keys, transposed=True)
        return (product if start is None else start + product), meanwhile()
    if start is not None:

        def onto(acc: Any) -> None:
            plgpu.wgmma(acc, x, keys.T)
            meanwhile()

        multiply: Any = pl.run_state(onto)
        return multiply(_PLGPU.ACC.init(start)), None

    def product_alone(acc: Any) -> tuple[jax.Array, Any]:
        plgpu.wgmma(acc, x, keys.T)
        other = meanwhile()
        return acc[...], other

    return pl.run_scoped(product_alone, _PLGPU.ACC((x.shape[0], keys.shape[0]), jnp.float32))


def add_product(
    acc: jax.Array,
    x: jax.Array,
    values: Any,
    other: jax.Array,
    meanwhile: Callable[[jax.Array], jax.Array],
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns acc + x @ values and meanwhile(other), which runs while the product does.

    Args:
      acc: float32[64, head_dim] in the WGMMA layout.
      x: 16-bit[64, keys] in the WGMMA layout.
      values: [keys, head_dim] in SMEM, a matrix operand.
      other: a register array.
      meanwhile: runs after the product was issued.
      interpret: use the twin.
    """
    if interpret:
        return acc + _product(x, values, transposed=False), meanwhile(other)

    def multiply(refs: Any) -> None:
        acc_ref, other_ref = refs
        plgpu.wgmma(acc_ref, x, values)
        other_ref[...] = meanwhile(other_ref[...])

    run: Any = pl.run_state(multiply)
    return run((_PLGPU.ACC.init(acc), other))


def both_products(
    x: jax.Array,
    keys: Any,
    acc: jax.Array,
    weights: jax.Array,
    values: Any,
    *,
    issued: Callable[[], Any],
    absorb: Callable[[jax.Array, Any], Any],
    interpret: bool,
) -> tuple[jax.Array, Any]:
    """Returns acc + weights @ values and absorb(x @ keys.T, issued()), which runs while the former product does.

    Args:
      x: 16-bit[64, head_dim] in the WGMMA layout.
      keys: [keys, head_dim] in SMEM, a matrix operand.
      acc: float32[64, head_dim] in the WGMMA layout.
      weights: 16-bit[64, keys] in the WGMMA layout.
      values: [keys, head_dim] in SMEM, a matrix operand.
      issued: runs after both products were issued.
      absorb: takes float32[64, keys] once they are there, and what `issued` gave; returns register arrays. What is not
        to delay the end of the second product is left for after it.
      interpret: use the twin.
    """
    if interpret:
        scores = _product(x, keys, transposed=True)
        noted = issued()
        return acc + _product(weights, values, transposed=False), absorb(scores, noted)

    def multiply(scores_ref: Any, acc_ref: Any) -> tuple[jax.Array, Any]:
        acc_ref[...] = acc
        plgpu.wgmma(scores_ref, x, keys.T)
        plgpu.wgmma(acc_ref, weights, values)
        noted = issued()
        # Arithmetic on the scores may not rise above the wait for them, nor sink below that for the other product.
        scores = lax.optimization_barrier(_PLGPU.wgmma_accumulator_load(scores_ref, wait_n=1))
        absorbed = lax.optimization_barrier(absorb(scores, noted))
        return acc_ref[...], absorbed

    types = [_PLGPU.ACC(shape, jnp.float32) for shape in ((x.shape[0], keys.shape[0]), acc.shape)]
    return pl.run_scoped(multiply, *types)


def load(ref: Any, rows: int, width: int, *, interpret: bool) -> jax.Array:
    """Returns [64, width] in the WGMMA layout: the beginnings of rows of plain 16-bit SMEM, the last one repeated.

    Args:
      ref: [..., pitch], whose leading axes count as one.
      rows: of ref, at most 64.
      width: at most the pitch.
      interpret: use the twin.
    """
    if interpret:
        row = jnp.minimum(lax.iota(jnp.int32, 64), rows - 1)
        return ref[...].reshape(-1, ref.shape[-1])[row, :width]
    code = functools.partial(ptx_rows.load, rows=rows, width=width)
    return call_inline(code, (PLAIN,), ref, result=result_type((64, width), ref.dtype, WGMMA))


def gather_descending(ref: Any, starts: jax.Array, keys: int, *, interpret: bool) -> jax.Array:
    """Returns [64, keys] in the WGMMA layout with element (r, k) at flat position starts[r] - k of plain SMEM.

    Args:
      ref: plain (untiled) SMEM.
      starts: int32[64] in the reduced WGMMA layout.
      keys: a multiple of 8.
      interpret: use the twin.
    """
    shape = (starts.shape[0], keys)
    if interpret:
        key = lax.broadcasted_iota(jnp.int32, shape, 1)
        return ref[...].reshape(-1)[lax.broadcast_in_dim(starts, shape, (0,)) - key]
    code = functools.partial(ptx_rows.gather_descending, shape=shape)
    return call_inline(code, (PLAIN, WGMMA_ROWS), ref, starts, result=result_type(shape, ref.dtype, WGMMA))


def keep_before(scores: jax.Array, end: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns float32[64, keys] scores with -inf at keys from end[row] on; int32[64] in the reduced WGMMA layout."""
    return _mask(scores, end, before=True, interpret=interpret)


def keep_from(scores: jax.Array, begin: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns float32[64, keys] scores with -inf at keys before begin[row]; int32[64] in the reduced WGMMA layout."""
    return _mask(scores, begin, before=False, interpret=interpret)


def drop_chunks(scores: jax.Array, absent: jax.Array, chunk: int, value: float, *, interpret: bool) -> jax.Array:
    """Returns float32[64, keys] scores with `value` at the keys of some chunks.

    Args:
      scores: in the WGMMA layout.
      absent: int32 scalar, bit i for the i-th chunk.
      chunk: keys of a chunk, a multiple of 8.
      value: what the scores there become.
      interpret: use the twin.
    """
    if interpret:
        bit = lax.broadcasted_iota(jnp.int32, scores.shape, 1) // chunk
        return jnp.where((absent >> bit) & 1 == 0, scores, jnp.full_like(scores, value))
    code = functools.partial(ptx_rows.drop_chunks, chunk=chunk, value=value)
    return call_inline(code, (WGMMA, SCALAR), scores, absent, result=result_type(scores.shape, scores.dtype, WGMMA))


def _mask(scores: jax.Array, limit: jax.Array, *, before: bool, interpret: bool) -> jax.Array:
    if interpret:
        key = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        limit = lax.broadcast_in_dim(limit, scores.shape, (0,))
        return jnp.where(key < limit if before else key >= limit, scores, jnp.full_like(scores, -jnp.inf))
    code = functools.partial(ptx_rows.mask, before=before)
    return call_inline(code, (WGMMA, WGMMA_ROWS), scores, limit, result=result_type(scores.shape, scores.dtype, WGMMA))


def scatter(ref: Any, rows: jax.Array, x: jax.Array) -> None:
    """Writes ref[rows[r]] = x[r] of a [64, width] WGMMA array, skipping negative rows; on the card only.

    Args:
      ref: GMEM [.., width].
      rows: int32[64] in the reduced WGMMA layout.
      x: of ref's dtype.
    """
    call_inline(ptx_rows.scatter, (PLAIN, WGMMA_ROWS, WGMMA), ref, rows, x)


def release_reads(*, interpret: bool) -> None:
    """Orders this thread's reads of shared memory before copies into it that a barrier after this allows."""
    if interpret:
        plgpu.commit_smem()
    else:
        call_inline(ptx_rows.fence_async_proxy, ())


def stay_before(x: jax.Array, *, interpret: bool) -> None:
    """Keeps what float32[64] x in the reduced WGMMA layout, never negative, needs before what follows."""
    if not interpret:
        call_inline(ptx_rows.stay_before, (WGMMA_ROWS,), x)


def rescale(acc: jax.Array, decay: jax.Array, *, interpret: bool) -> jax.Array:
    """Returns acc * decay row by row; a warp whose rows all have decay 1 skips the product.

    Args:
      acc: float32[64, columns] in the WGMMA layout.
      decay: float32[64] in the reduced WGMMA layout, at most 1.
      interpret: use the twin.
    """

    def multiply(acc: jax.Array, decay: jax.Array) -> jax.Array:
        return acc * lax.broadcast_in_dim(decay, acc.shape, (0,))

    if interpret:
        return multiply(acc, decay)
    some = call_inline(ptx_rows.any_below_one, (WGMMA_ROWS,), decay, result=result_type((), jnp.int32, SCALAR))
    return lax.cond(some > 0, multiply, lambda acc, decay: acc, acc, decay)


def pass_turn(barrier: jax.Array, *, interpret: bool) -> None:
    """Arrives at a named barrier of two warpgroups. The interpreter needs no turns: they change no result."""
    if not interpret:
        call_inline(functools.partial(ptx_rows.named_barrier, action="arrive"), (SCALAR,), barrier)


def take_turn(barrier: jax.Array, *, interpret: bool) -> None:
    """Waits at a named barrier of two warpgroups until the other one passed the turn."""
    if not interpret:
        call_inline(functools.partial(ptx_rows.named_barrier, action="sync"), (SCALAR,), barrier)
