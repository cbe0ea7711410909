"""The learned relative bias as the operator takes it: a table of biases, plain or in the sheared layout.

Both are made from the relative query and the projection of a layer; `shear` makes the second form from the first.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from inkling_pallas.core.card_only import by_platform, for_card
from inkling_pallas.core.devices import Place, place_of, spread
from inkling_pallas.core.dispatch import kernels_of, load_backend, require_threads, usual_card
from inkling_pallas.core.errors import FLOAT_DTYPES, int32_array, refuse, require_array, require_plain, static_bool
from inkling_pallas.core.problem import Lengths
from inkling_pallas.core.safe_lengths import shifts_of_rows
from inkling_pallas.core.sheared_layout import ShearedLogits, shear_rows

PRODUCERS = ("portable", "hopper")


def relative_logits(r: jax.Array, proj: jax.Array, tau: jax.Array | None = None) -> jax.Array:
    """Returns the table of bias values per token, head and distance: `tau[t] * sum_d r[t, h, d] * proj[d, e]`.

    Args:
      r: float[num_tokens, num_heads, d_rel], the relative query (d_rel is 16 in Inkling).
      proj: float[d_rel, rel_extent], shared by the heads of a layer, in the dtype of r.
      tau: float32[num_tokens] from `log_scaling`, or None. The caller multiplies q by it, too.

    Returns:
      [num_tokens, num_heads, rel_extent] in the dtype of r; summed and scaled in float32 before it is rounded.

    Raises:
      ValueError: if shapes or dtypes do not fit.

    Example:
      >>> relative_logits(jnp.ones((5, 8, 16)), jnp.ones((16, 1024))).shape
      (5, 8, 1024)
    """
    require_plain("r", r)
    require_plain("proj", proj)
    require_plain("tau", tau)
    if r.ndim != 3 or proj.ndim != 2 or proj.shape[0] != r.shape[2]:
        raise refuse(
            "proj",
            "have shape (d_rel, rel_extent) with d_rel = r.shape[2]",
            f"{proj.shape} with r {r.shape}",
            "Transpose it?",
        )
    if proj.dtype != r.dtype:
        raise refuse("proj", f"have the dtype of r, {r.dtype}", proj.dtype, "Cast one of them with .astype().")
    table = jnp.einsum("thd,de->the", r, proj, preferred_element_type=jnp.float32, precision=_exact(r))
    if tau is not None:
        if tau.shape != r.shape[:1] or tau.dtype != jnp.float32:
            raise refuse(
                "tau",
                f"be float32 of shape {r.shape[:1]}",
                f"{tau.dtype} of shape {tau.shape}",
                "Take it from log_scaling().",
            )
        table = table * tau[:, None, None]
    return table.astype(r.dtype)


def _exact(array: jax.Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if array.dtype == jnp.float32 else None


def log_scaling(positions: jax.Array, n_floor: int = 128_000, alpha: float = 0.1) -> jax.Array:
    """Returns Inkling's temperature of its global layers, `1 + alpha * log(max((position + 1) / n_floor, 1))`.

    Args:
      positions: int[num_tokens], absolute positions of the query tokens.
      n_floor: positions below it have temperature 1.
      alpha: strength.

    Returns:
      float32[num_tokens]; multiply q by it and pass it to `relative_logits`. The operator itself never sees it.

    Example:
      >>> [round(float(x), 5) for x in log_scaling(jnp.array([127_999, 999_999]))]
      [1.0, 1.20557]
    """
    require_plain("positions", positions)
    reach = (positions.astype(jnp.float32) + 1.0) / jnp.float32(n_floor)
    return 1.0 + jnp.float32(alpha) * jnp.log(jnp.maximum(reach, 1.0))


def shear(
    rel_logits: jax.Array,
    *,
    cu_seqlens_q: jax.Array,
    cache_seqlens: jax.Array,
    kv_offset: jax.Array | None = None,
    total_seqlens: jax.Array | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> ShearedLogits:
    """Returns a plain table of biases in the sheared layout, for the call of the operator that has these lengths.

    The lengths say where each row stands, which decides where its keys start: see `inkling_pallas.core.sheared_layout`.

    Args:
      rel_logits: bf16, f16 or f32 [num_tokens, num_heads, rel_extent].
      cu_seqlens_q: int32[batch + 1], as in `inkling_rel_attention`, as are those that follow.
      cache_seqlens: int32[batch]. Over a context axis: the lengths of whole sequences.
      kv_offset: int32[batch] or None.
      total_seqlens: int32[batch] or None.
      backend: "portable" is plain jnp; "hopper" a kernel for compute capability 9.0, for 16-bit dtypes and extents that
        are multiples of 8; "auto" takes the kernel where the device of the table and the table allow it.
      interpret: run the kernel in the Pallas GPU interpreter.

    Raises:
      ValueError: for a wrong shape, dtype or backend.
      NotImplementedError: where the named backend lacks this call.

    Example:
      >>> sheared = shear(
      ...     jnp.ones((3, 2, 16)), cu_seqlens_q=jnp.array([0, 3], jnp.int32), cache_seqlens=jnp.array([40], jnp.int32)
      ... )
      >>> sheared.table.shape, sheared.shifts.tolist()
      ((3, 2, 24), [6, 7, 0])
    """
    advice = "It is a plain table, from relative_logits()."
    require_plain("rel_logits", rel_logits)
    require_array("rel_logits", rel_logits, ("num_tokens", "num_heads", "rel_extent"), _float_of(rel_logits), advice)
    num_tokens, _, rel_extent = rel_logits.shape
    lengths = Lengths(cache_seqlens, cu_seqlens_q, kv_offset, total_seqlens)
    shifts = _shifts(lengths, num_tokens, rel_extent)
    place = place_of((rel_logits, shifts))
    kernel = _kernel(backend, interpret, rel_logits, rel_extent, place, projects=False)

    def by_kernel(rel_logits: jax.Array, shifts: jax.Array) -> jax.Array:
        marked = for_card(rel_logits, "hopper", interpret)
        return kernel.shear(marked, shifts, interpret, usual_card("hopper", place.device))

    with jax.named_scope("inkling_shear"):
        table = _make(by_kernel, shear_rows, kernel, backend, place, rel_logits, shifts)
    return ShearedLogits(table=table, shifts=shifts, rel_extent=rel_extent)


def sheared_relative_logits(
    r: jax.Array,
    proj: jax.Array,
    tau: jax.Array | None = None,
    *,
    cu_seqlens_q: jax.Array,
    cache_seqlens: jax.Array,
    kv_offset: jax.Array | None = None,
    total_seqlens: jax.Array | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> ShearedLogits:
    """Returns `shear(relative_logits(r, proj, tau), ...)`; with the kernel in one pass, without the plain table.

    Args:
      r: float[num_tokens, num_heads, d_rel], the relative query.
      proj: float[d_rel, rel_extent], in the dtype of r.
      tau: float32[num_tokens] from `log_scaling`, or None.
      cu_seqlens_q: int32[batch + 1], as in `inkling_rel_attention`, as are those that follow.
      cache_seqlens: int32[batch]. Over a context axis: the lengths of whole sequences.
      kv_offset: int32[batch] or None.
      total_seqlens: int32[batch] or None.
      backend: as in `shear`; the kernel takes d_rel = 16.
      interpret: run the kernel in the Pallas GPU interpreter.

    Raises:
      ValueError: for a wrong shape, dtype or backend.
      NotImplementedError: where the named backend lacks this call.

    Numerics:
      The kernel sums in float32 and rounds once, as `relative_logits` does; the order of the 16 terms may differ, so
      that a bias may be the neighbouring number of its dtype.

    Example:
      >>> sheared = sheared_relative_logits(
      ...     jnp.ones((3, 2, 16)), jnp.ones((16, 64)),
      ...     cu_seqlens_q=jnp.array([0, 3], jnp.int32), cache_seqlens=jnp.array([40], jnp.int32)
      ... )
      >>> sheared.table.shape
      (3, 2, 72)
    """
    for name, array in (("r", r), ("proj", proj), ("tau", tau)):
        require_plain(name, array)
    table = jax.eval_shape(relative_logits, r, proj, tau)
    num_tokens, _, rel_extent = table.shape
    shifts = _shifts(Lengths(cache_seqlens, cu_seqlens_q, kv_offset, total_seqlens), num_tokens, rel_extent)
    place = place_of((r, proj, tau, shifts))
    kernel = _kernel(backend, interpret, r, rel_extent, place, projects=True)

    def by_kernel(r: jax.Array, proj: jax.Array, tau: jax.Array | None, shifts: jax.Array) -> jax.Array:
        marked = for_card(r, "hopper", interpret)
        return kernel.project(marked, proj, tau, shifts, interpret, usual_card("hopper", place.device))

    def in_two(r: jax.Array, proj: jax.Array, tau: jax.Array | None, shifts: jax.Array) -> jax.Array:
        return shear_rows(relative_logits(r, proj, tau), shifts)

    with jax.named_scope("inkling_sheared_relative_logits"):
        sheared = _make(by_kernel, in_two, kernel, backend, place, r, proj, tau, shifts)
    return ShearedLogits(table=sheared, shifts=shifts, rel_extent=rel_extent)


def _float_of(array: Any) -> str:
    """Returns the dtype's name if it is one to compute with, else what it should be."""
    name = str(getattr(array, "dtype", ""))
    return name if name in FLOAT_DTYPES else " or ".join(FLOAT_DTYPES)


def _shifts(lengths: Lengths, num_tokens: int, rel_extent: int) -> jax.Array:
    """Returns the shift of each row after checking the forms of the lengths."""
    for name, array in zip(Lengths._fields, lengths, strict=True):
        require_plain(name, array)
    lengths = Lengths(*map(int32_array, Lengths._fields, lengths))
    batch = lengths.cache_seqlens.shape[0]
    for name, array in zip(Lengths._fields, lengths, strict=True):
        size = batch + 1 if name == "cu_seqlens_q" else batch
        if array is not None:
            require_array(name, array, (size,), "int32", "As in inkling_rel_attention.")
    return shifts_of_rows(num_tokens, lengths, rel_extent)


def _make(
    by_kernel: Callable[..., jax.Array],
    other: Callable[..., jax.Array],
    kernel: Any,
    backend: str,
    place: Place,
    *arrays: Any,
) -> jax.Array:
    """Returns the table by the kernel if there is one, which "auto" may have guessed."""
    if kernel is None:
        return other(*arrays)
    return by_platform(by_kernel, other if place.is_guess and backend == "auto" else None, *arrays)


def _kernel(backend: str, interpret: Any, source: jax.Array, rel_extent: int, place: Place, *, projects: bool) -> Any:
    """Returns the module of kernels to use, or None for plain jnp."""
    if backend not in ("auto", *PRODUCERS):
        rule = f"be 'auto' or one of {', '.join(map(repr, PRODUCERS))}"
        raise refuse("backend", rule, repr(backend), "'auto' takes the kernel where the device has it.")
    if backend != "hopper" and static_bool("interpret", interpret):
        raise refuse("interpret", "be False without a kernel", interpret, "Name it: backend='hopper'.")
    if backend == "portable" or (backend == "auto" and "hopper" not in kernels_of(place.device)):
        return None
    if interpret:
        require_threads()
    no_kernel = spread({"r" if projects else "rel_logits": source})
    if no_kernel is not None and backend != "auto":
        raise NotImplementedError(no_kernel)
    kernel = load_backend("shear")
    card = usual_card("hopper", place.device)
    if backend == "auto" and (no_kernel or kernel.unsupported(source, rel_extent, projects=projects, card=card)):
        return None
    return kernel
