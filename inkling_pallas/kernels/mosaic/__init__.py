"""What Pallas does not offer: inline code, the interpreter's seams, layouts.

This folder alone touches jax's private modules, and of it only `ptx`.

Each piece of inline code stands behind one function here, with a plain-jnp twin for the interpreter. A register
array's `layout` says which thread holds which element; index arrays have the layout of the values that they move.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels.mosaic.ptx import cluster as ptx_cluster
from inkling_pallas.kernels.mosaic.ptx import numbering, warpgroup
from inkling_pallas.kernels.mosaic.ptx import seq_table as ptx_table

numbering.number_once()

WGMMA = plgpu.Layout.WGMMA
_PLGPU: Any = plgpu  # Its type stubs lack some public names.
WGMMA_COLUMNS = WGMMA.reduce(0)
WGMMA_ROWS = WGMMA.reduce(1)
THREADS = warpgroup.THREADS
_SWIZZLE: Any = (_PLGPU.TilingTransform((8, 64)), _PLGPU.SwizzleTransform(128))
_SWIZZLED = plgpu.RefType(_SWIZZLE)
PLAIN = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT(())


def strided(shape: tuple[int, ...], vec_size: int = 1) -> Any:
    """Returns the layout in which consecutive threads hold consecutive vectors of `vec_size` elements."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=vec_size)


def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """Returns int32 indices along one axis in a register layout."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def full(shape: tuple[int, ...], value: float, dtype: Any, layout: Any) -> jax.Array:
    """Returns a constant in a register layout."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the SMEM type of a matrix operand: tiles of 8 x 64 16-bit elements with the 128-byte swizzle."""
    return plgpu.SMEM(shape, dtype, transforms=_SWIZZLE)


def kernel(body: Any, *, interpret: Any, auto_barriers: bool = True, **kwargs: Any) -> Any:
    """Returns `plgpu.kernel` with this package's compiler parameters.

    `interpret` is a bool or the interpreter's parameters. Without `auto_barriers` the compiler puts no barrier around
    accesses to shared memory: the body's own barriers must order them, also among the threads of a warpgroup.
    """
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    scratch = {} if auto_barriers else {"unsafe_no_auto_barriers": True, "reduction_scratch_bytes": 0}
    params = plgpu.CompilerParams(approx_math=True, **scratch)
    return plgpu.kernel(body, compiler_params=params, interpret=interpret or None, thread_name="wg", **kwargs)


def apart[Tree](arrays: Tree) -> Tree:
    """Returns arrays that XLA does not make one with a slice around a kernel.

    It fuses a kernel with the slices of a loop over layers that it reads or that its results go to. One that writes in
    place would then write to another buffer than the one that is read afterwards. Costs nothing where there are no
    slices.
    """
    return lax.optimization_barrier(arrays)


def in_clusters(size: int) -> dict[str, Any]:
    """Returns the arguments of `kernel` for CTAs in clusters, counted by axis "rank"; none for a size of 1."""
    return {"cluster": (size,), "cluster_names": ("rank",)} if size > 1 else {}


def wait_for_previous_kernel(*, interpret: bool) -> None:
    """Waits until the kernel before this one in the stream is complete; a kernel may be launched before that."""
    if not interpret:
        plgpu.griddepcontrol_wait()


def let_next_kernel_launch(*, interpret: bool) -> None:
    """Lets the next kernel's blocks start on SMs with room; they still wait for this kernel's results."""
    if not interpret:
        plgpu.griddepcontrol_launch_dependents()


def matmul(
    a: Any, b: Any, *, rows: int, columns: int, meanwhile: Callable[[], Any] = lambda: None
) -> tuple[jax.Array, Any]:
    """Returns a @ b of two SMEM operands, float32[rows, columns] in the WGMMA layout, and what `meanwhile` returns."""

    def product(acc: Any) -> tuple[jax.Array, Any]:
        plgpu.wgmma(acc, a, b)
        other = meanwhile()
        return acc[...], other

    return pl.run_scoped(product, _PLGPU.ACC((rows, columns), jnp.float32))


def matmul_onto(acc: jax.Array, a: Any, b: Any, *, interpret: bool) -> jax.Array:
    """Returns acc + a @ b of two SMEM operands; the interpreter cannot start an accumulator from a register array."""
    if interpret:
        return acc + matmul(a, b, rows=acc.shape[0], columns=acc.shape[1])[0]
    multiply: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
    return multiply(_PLGPU.ACC.init(acc))


def read_word(ref: Any, row: Any, column: Any, *, interpret: bool) -> jax.Array:
    """Returns an int32 scalar from SMEM, also in the code of a single warp, where Pallas cannot read one."""
    if interpret:
        return ref[row, column]
    index = [jnp.asarray(i, jnp.int32) for i in (row, column)]
    return call_inline(
        ptx_table.load_word, (PLAIN, SCALAR, SCALAR), ref, *index, result=result_type((), jnp.int32, SCALAR)
    )


def write_word(ref: Any, row: Any, column: Any, word: jax.Array, *, interpret: bool) -> None:
    """Writes an int32 scalar to SMEM, also in the code of a single warp."""
    if interpret:
        ref[row, column] = word
        return
    places = [jnp.asarray(i, jnp.int32) for i in (row, column)]
    call_inline(ptx_table.store_word, (PLAIN, SCALAR, SCALAR, SCALAR), ref, *places, word)


def gather(
    ref: Any,
    rows: jax.Array,
    columns: jax.Array,
    *,
    layout: Any,
    vectors: warpgroup.Vectors = "separate",
    interpret: bool,
) -> jax.Array:
    """Returns ref[rows, columns] element by element, where ref's leading axes count as one.

    Args:
      ref: plain (untiled) SMEM or GMEM.
      rows: int32, in bounds.
      columns: int32 of the same shape, in bounds.
      layout: of rows, columns and the result.
      vectors: whether the elements of a register vector lie anywhere in ref, are neighbours there, or are all
        one element.
      interpret: use the twin.
    """
    if interpret:
        return ref[...].reshape(-1, ref.shape[-1])[rows, columns]
    code = functools.partial(warpgroup.gather, vectors=vectors)
    return call_inline(
        code, (PLAIN, layout, layout), ref, rows, columns, result=result_type(rows.shape, ref.dtype, layout)
    )


def gather_descending(ref: Any, starts: jax.Array, keys: int, *, interpret: bool) -> jax.Array:
    """Returns [keys, columns] in the WGMMA layout with element (k, c) at flat position starts[c] - k of plain SMEM.

    Args:
      ref: plain (untiled) SMEM.
      starts: int32[columns] in the reduced WGMMA layout.
      keys: a multiple of 64.
      interpret: use the twin.
    """
    shape = (keys, starts.shape[0])
    if interpret:
        key = lax.broadcasted_iota(jnp.int32, shape, 0)
        return ref[...].reshape(-1)[lax.broadcast_in_dim(starts, shape, (1,)) - key]
    code = functools.partial(warpgroup.gather_descending, shape=shape)
    return call_inline(code, (PLAIN, WGMMA_COLUMNS), ref, starts, result=result_type(shape, ref.dtype, WGMMA))


def scatter(
    ref: Any, rows: jax.Array, columns: jax.Array, x: jax.Array, *, layout: Any, vectors: warpgroup.Vectors = "separate"
) -> None:
    """Writes ref[rows, columns] = x element by element, skipping negative rows; on the card only. See `gather`."""
    code = functools.partial(warpgroup.scatter, vectors=vectors, swizzled=False)
    call_inline(code, (PLAIN, layout, layout, layout), ref, rows, columns, x)


def scatter_columns(ref: Any, rows: jax.Array, x: jax.Array) -> None:
    """Writes ref[rows[c]] = x[:, c] of a [width, columns] WGMMA array, skipping negative rows; on the card only.

    Args:
      ref: GMEM [.., width].
      rows: int32[columns] in the reduced WGMMA layout.
      x: of ref's dtype.
    """
    call_inline(warpgroup.scatter_columns, (PLAIN, WGMMA_COLUMNS, WGMMA), ref, rows, x)


def open_exchange(barrier: Any, *, interpret: bool) -> None:
    """Makes ready for `exchange`; for all threads of a CTA, as early as may be."""
    if not interpret:
        call_inline(ptx_cluster.open_exchange, (PLAIN,), barrier)


def exchange(barrier: Any, parts: Any, lses: Any, x: jax.Array, lse: jax.Array, rank: jax.Array) -> None:
    """Sends each CTA of a cluster its rows of a WGMMA array, and a log-sum-exp of each column, and waits for its own.

    For one warpgroup of each CTA, once; on the card only.

    Args:
      barrier: int32[2] in plain SMEM, made by `open_exchange`.
      parts: float32[head_dim, columns] in plain SMEM: head_dim / ranks rows from each rank, those that this one merges.
      lses: float32[ranks, columns] in plain SMEM.
      x: float32[head_dim, columns] in the WGMMA layout.
      lse: float32[columns] in the reduced WGMMA layout.
      rank: this CTA's.
    """
    kinds = (PLAIN, PLAIN, PLAIN, WGMMA, WGMMA_COLUMNS, SCALAR)
    call_inline(ptx_cluster.exchange, kinds, barrier, parts, lses, x, lse, rank)


def store_operand(ref: Any, x: jax.Array, *, layout: Any, interpret: bool) -> None:
    """Writes a register array, whose vectors lie in a row, over a whole matrix operand in SMEM (`swizzled`)."""
    if interpret:
        ref[...] = x
        return
    rows, columns = (iota(x.shape, axis, layout) for axis in (0, 1))
    code = functools.partial(warpgroup.scatter, vectors="neighbours", swizzled=True)
    call_inline(code, (_SWIZZLED, layout, layout, layout), ref, rows, columns, x)


def store_transposed(ref: Any, x: jax.Array, *, interpret: bool) -> None:
    """Writes the transpose of a 16-bit array in the WGMMA layout over a whole matrix operand in SMEM (`swizzled`)."""
    if interpret:
        ref[...] = x.T
    else:
        call_inline(warpgroup.store_transposed, (_SWIZZLED, WGMMA), ref, x)


def clear_rows_outside(ref: Any, begin: jax.Array, end: jax.Array, *, interpret: bool) -> None:
    """Writes zeros over the rows of a matrix operand in SMEM (`swizzled`) that are not in [begin, end)."""
    if interpret:
        row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        ref[...] = jnp.where((row >= begin) & (row < end), ref[...], jnp.zeros(ref.shape, ref.dtype))
    else:
        code = functools.partial(warpgroup.clear_rows_outside, shape=ref.shape)
        call_inline(code, (_SWIZZLED, SCALAR, SCALAR), ref, begin, end)


def prefetch_part(ref: Any, part: jax.Array, *, interpret: bool) -> None:
    """Asks for 128 lines of an int32 array in GMEM, the `part`-th; nothing where that is past its end."""
    if not interpret:
        call_inline(ptx_table.prefetch_part, (PLAIN, SCALAR), ref, part)


def scan_table(
    sources: list[Any], table: Any, *, end_of: ptx_table.Rule, facts_of: ptx_table.Rule, interpret: bool
) -> None:
    """Makes int32[7, batch] in SMEM from per-sequence lengths in GMEM.

    Rows 0 to 3 are what `facts_of` returns but for its last, of which row 4 is the running sum; rows 5 and 6 are the
    running maxima of row 0 + row 1 and of that last one.

    Args:
      sources: int32[batch + 1] row offsets, then int32[batch] each.
      table: SMEM.
      end_of: (row offset, next one) -> where the rows of a sequence end.
      facts_of: (row offset, next one, largest end of the sequences before, *other lengths) -> five words.
      interpret: use the twin.
    """
    batch = table.shape[1]
    if not interpret:
        code = functools.partial(ptx_table.scan_table, batch=batch, end_of=end_of, facts_of=facts_of)
        call_inline(code, (PLAIN,) * (len(sources) + 1), *sources, table)
        return
    offsets, *others = (source[...] for source in sources)
    start, end = offsets[:-1], offsets[1:]
    claimed = jnp.concatenate([jnp.zeros((1,), jnp.int32), lax.cummax(end_of(start, end))[:-1]])
    *facts, work = facts_of(start, end, claimed, *others)
    scans = [jnp.cumsum(work, dtype=jnp.int32), lax.cummax(facts[0] + facts[1]), lax.cummax(work)]
    for row, values in enumerate([*facts, *scans]):
        table[row] = values


def result_type(shape: tuple[int, ...], dtype: Any, layout: Any) -> Any:
    """Returns the type of a register array that inline code returns."""
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)


def call_inline(code: Callable[..., Any], types: tuple[Any, ...], *args: Any, result: Any = None) -> Any:
    """Inlines code(*args); types are the layouts of arrays and the reference types of refs."""
    # A constant would otherwise reach inline code without registers, and fail there.
    arrays = [
        plgpu.layout_cast(arg, kind) if kind not in (PLAIN, _SWIZZLED, SCALAR) else arg
        for arg, kind in zip(args, types, strict=True)
    ]
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(lambda ctx, *args: code(*args))(*arrays)
