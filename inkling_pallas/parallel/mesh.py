"""The operator over several devices: heads on one mesh axis, parts of each sequence on another, or both at once.

Heads (tensor parallel) need no communication. Parts of a sequence (context parallel, for decodes over long contexts)
merge by their log-sum-exp: few rows by one all-gather and `merge_partials`, many by one `pmax` of the LSE and one
`psum` of weighted outputs and weights, for what an all-reduce moves does not grow with the devices.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from inkling_pallas.attention import inkling_rel_attention
from inkling_pallas.cache_writes import write_kv
from inkling_pallas.core.cache_layouts import HEAD_AXIS
from inkling_pallas.core.describe import one_line_repr
from inkling_pallas.core.errors import float_dtype, refuse, require_plain, static_bool, static_int
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.core.sheared_layout import ALIGNMENT, ShearedLogits
from inkling_pallas.parallel.context import ContextShards
from inkling_pallas.parallel.merge import merge_over_axis

_BY_SHARD = ("block_table", "cache_seqlens", "kv_offset")
_REPLICATED = ("block_table", "cache_seqlens", "cu_seqlens_q", "kv_offset", "total_seqlens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMesh:
    """Which mesh axes the heads and the parts of a sequence lie on. Make one with `AttentionMesh.make`.

    Attributes:
      mesh: as given, with axes of type Auto; where kv heads are replicated, with the axis of the heads cut in two.
      head_axes: axes of the query heads.
      kv_head_axes: axes of the kv heads, a prefix of head_axes.
      context_axis: axis of the parts of a sequence, or None.

    Example:
      >>> import jax, inkling_pallas as ip
      >>> mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> devices = ip.AttentionMesh.make(mesh, num_heads=8, num_kv_heads=1, head_axis="tp")
      >>> cache = ip.PagedKVCache.zeros(num_blocks=9, block_size=16, num_kv_heads=1, head_dim=64)
      >>> devices.place(cache).arrays[0].sharding.spec[2]
      'tp'
    """

    mesh: Mesh
    head_axes: tuple[str, ...]
    kv_head_axes: tuple[str, ...]
    context_axis: str | None
    __repr__ = one_line_repr

    @classmethod
    def make(
        cls,
        mesh: Mesh,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_axis: str | None = None,
        context_axis: str | None = None,
    ) -> Self:
        """Returns the division of a layer over a mesh.

        With more devices than kv heads, each kv head lies on several devices, which share its query heads.

        Args:
          mesh: its axes may be of any type; the division uses the same devices with axes of type Auto.
          num_heads: query heads of the layer, on all devices together.
          num_kv_heads: its kv heads.
          head_axis: mesh axis for the heads, or None.
          context_axis: mesh axis for the parts of a sequence, or None.

        Raises:
          ValueError: for an unknown axis, the same axis twice, or one whose size does not divide the heads, or
            query heads that are no multiple of the kv heads.
        """
        heads, kv_heads = static_int("num_heads", num_heads, 1), static_int("num_kv_heads", num_kv_heads, 1)
        if heads % kv_heads:
            rule = f"be a multiple of num_kv_heads = {kv_heads}"
            raise refuse("num_heads", rule, heads, "Both are those of the whole layer.")
        for name, axis in (("head_axis", head_axis), ("context_axis", context_axis)):
            if axis is not None and axis not in mesh.axis_names:
                raise refuse(name, f"be an axis of the mesh, {', '.join(mesh.axis_names)}", repr(axis), "Or None.")
        if head_axis is None:
            mesh = _with_auto_axes(mesh)
            return cls(mesh=mesh, head_axes=(), kv_head_axes=(), context_axis=context_axis)
        if head_axis == context_axis:
            raise refuse(
                "context_axis", "be another axis than head_axis", repr(context_axis), "Use a mesh of two axes."
            )
        size = mesh.shape[head_axis]
        _require_divides(head_axis, size, heads, kv_heads)
        mesh = _with_auto_axes(mesh)
        if size <= kv_heads:
            return cls(mesh=mesh, head_axes=(head_axis,), kv_head_axes=(head_axis,), context_axis=context_axis)
        cut, copies = _cut_axis(mesh, head_axis, kv_heads)
        return cls(mesh=cut, head_axes=(head_axis, copies), kv_head_axes=(head_axis,), context_axis=context_axis)

    @property
    def num_shards(self) -> int:
        """Parts of each sequence."""
        return 1 if self.context_axis is None else self.mesh.shape[self.context_axis]

    def cache_sharding(self, layout: str) -> NamedSharding:
        """Returns how the arrays of a cache lie on the devices: pages by part, kv heads by head.

        Args:
          layout: the cache's layout.
        """
        return NamedSharding(self.mesh, self._cache_spec(layout))

    def place(self, cache: PagedKVCache) -> PagedKVCache:
        """Returns the cache with its arrays on the devices: for setting up, not for a step.

        Over several processes each takes its devices' part of the cache that it was given, and nothing is compared: all
        must give the same. For an empty one larger than a device call `PagedKVCache.zeros` in a function jitted with
        `out_shardings=cache_sharding(layout)` instead.

        Args:
          cache: whole. With a context axis its pages are those of the first part, then those of the second, and so on.

        Raises:
          ValueError: if the parts do not divide its pages.
        """
        if cache.num_blocks % self.num_shards:
            rule = f"have a multiple of {self.num_shards} pages, the size of mesh axis {self.context_axis!r}"
            raise refuse("cache", rule, cache.num_blocks, "Each device has a pool of its own, and all are of one size.")
        sharding = self.cache_sharding(cache.layout)
        return dataclasses.replace(cache, arrays=tuple(_put(array, sharding) for array in cache.arrays))

    def write_kv(self, cache: PagedKVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> PagedKVCache:
        """Returns the cache with new keys and values written, each on the devices that hold its slot and head.

        Args:
          cache: as `place` lays it.
          k: [num_tokens, num_kv_heads, head_dim] in the dtype of the cache.
          v: like k.
          slots: int32[num_tokens]; with a context axis int32[num_shards, num_tokens] from `ContextShards.slots`.

        Raises:
          ValueError: as `inkling_pallas.write_kv` would.
        """
        cache_spec, rows = self._cache_spec(cache.layout), PartitionSpec(None, self.kv_head_axes or None)
        by_part = PartitionSpec(self.context_axis)

        def write(cache: PagedKVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> PagedKVCache:
            return write_kv(cache, k, v, slots if self.context_axis is None else slots[0])

        return self._map(write, (cache_spec, rows, rows, by_part), cache_spec)(cache, k, v, slots)

    def attend(
        self, q: jax.Array, cache: PagedKVCache, *, shards: ContextShards | None = None, **arguments: Any
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Returns what `inkling_rel_attention` returns, its heads sharded over the head axes.

        Args:
          q: [num_tokens, num_heads, head_dim].
          cache: as `place` lays it.
          shards: with a context axis, the parts of each sequence; instead of block_table, cache_seqlens, kv_offset and
            total_seqlens.
          **arguments: the other keywords of `inkling_rel_attention`; not plan and out, which belong to one device.

        Raises:
          ValueError: where `shards` and the context axis do not go together, and as `inkling_rel_attention` would.

        Numerics:
          Heads alone give the bits of one device where its backend plans them alike. Parts are float32 and merged in
          float32, which adds at most 1e-5 of relative error.
        """
        arrays, static = self._arrays(q, shards, arguments)
        heads = PartitionSpec(None, self.head_axes or None)
        specs = {"rel_logits": heads} | {name: PartitionSpec() for name in _REPLICATED}
        if self.context_axis is not None:
            specs |= {name: PartitionSpec(self.context_axis) for name in _BY_SHARD}
        if isinstance(arrays.get("rel_logits"), ShearedLogits):
            self._require_one_shear(cache)
            specs["rel_logits"] = dataclasses.replace(arrays["rel_logits"], table=heads, shifts=PartitionSpec())
        in_specs = (heads, self._cache_spec(cache.layout), {name: specs[name] for name in arrays})
        local = functools.partial(self._heads if self.context_axis is None else self._parts, static)
        return self._map(local, in_specs, heads)(q, cache, arrays)

    def _require_one_shear(self, cache: PagedKVCache) -> None:
        """Raises ValueError where parts of a sequence need a shear each: it depends on their kv_offset modulo 8."""
        if self.context_axis is not None and cache.block_size % ALIGNMENT:
            rule = f"be a multiple of {ALIGNMENT} for ShearedLogits over a context axis"
            raise refuse("block_size", rule, cache.block_size, "Pass a plain array as rel_logits.")

    def _arrays(
        self, q: jax.Array, shards: ContextShards | None, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns (arrays, static arguments) of a call."""
        if (shards is None) != (self.context_axis is None):
            rule = "be given exactly where there is a context axis"
            raise refuse("shards", rule, f"{type(shards).__name__} with axis {self.context_axis!r}", "See cut_context.")
        for name in ("plan", "out", *(ContextShards.NAMES if shards else ())):
            if arguments.get(name) is not None:
                raise refuse(name, "be left out here", "a value", "It belongs to a call on one device.")
        if shards is not None and shards.num_shards != self.num_shards:
            rule = f"have {self.num_shards} parts, the size of mesh axis {self.context_axis!r}"
            raise refuse("shards", rule, shards.num_shards, "Cut the batch for this mesh.")
        given = arguments if shards is None else arguments | shards.arguments()
        names = ("rel_logits", *_REPLICATED)
        arrays = {name: given[name] for name in names if given.get(name) is not None}
        for name, array in {"q": q, **arrays}.items():
            if not isinstance(array, ShearedLogits):
                require_plain(name, array)
        return arrays, {name: value for name, value in given.items() if name not in names}

    def _heads(self, static: dict[str, Any], q: jax.Array, cache: PagedKVCache, arrays: dict[str, Any]) -> Any:
        """Returns the result of a device's own heads."""
        return inkling_rel_attention(q, cache, None, **arrays, **static)

    def _parts(self, static: dict[str, Any], q: jax.Array, cache: PagedKVCache, arrays: dict[str, Any]) -> Any:
        """Returns the merged result of all parts; runs on each device with its own part."""
        assert self.context_axis is not None
        mine = {name: array[0] if name in _BY_SHARD else array for name, array in arrays.items()}
        wanted = static.get("out_dtype")
        dtype = q.dtype if wanted is None else float_dtype("out_dtype", wanted, "None gives the dtype of q.")
        return_lse = static_bool("return_lse", static.get("return_lse", False))
        how = static | {"return_lse": True, "out_dtype": jnp.float32}
        out, lse = inkling_rel_attention(q, cache, None, **mine, **how)
        out, lse = merge_over_axis(out, lse, self.context_axis)
        return (out.astype(dtype), lse) if return_lse else out.astype(dtype)

    def _cache_spec(self, layout: str) -> PartitionSpec:
        by_head = [self.kv_head_axes or None if axis == HEAD_AXIS[layout] else None for axis in range(4)]
        return PartitionSpec(self.context_axis, *by_head[1:])

    def _map(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        # Unchecked: a kernel's outputs do not say over which mesh axes they vary, and psum makes them equal anyway.
        how = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
        context = jax.sharding.get_abstract_mesh()
        if context.empty:
            return jax.shard_map(function, mesh=self.mesh, **how)
        cut = {
            name for name, kind in zip(context.axis_names, context.axis_types, strict=True) if kind == AxisType.Manual
        }
        self._require_context(context, cut)
        inner = jax.shard_map(function, axis_names=set(context.axis_names) - cut, **how)
        return lambda *arrays: inner(*_laid(arrays, in_specs, context))

    def _require_context(self, context: AbstractMesh, cut: set[str]) -> None:
        """Raises ValueError for a mesh in context that is not this one, or of which our axes are cut already."""
        if context.shape_tuple != self.mesh.shape_tuple:
            rule = f"be that of the AttentionMesh, {dict(self.mesh.shape)}"
            advice = "Name its `mesh`: in jax.set_mesh, or in the outer jax.shard_map."
            raise refuse("the mesh in context", rule, dict(context.shape), advice)
        ours = {*self.head_axes, self.context_axis} & cut
        if ours:
            rule = f"leave axis {', '.join(sorted(ours))} to AttentionMesh"
            raise refuse("the outer jax.shard_map", rule, f"axis_names {sorted(cut)}", "Cut other axes there.")


def _laid(arrays: Any, specs: Any, mesh: AbstractMesh) -> Any:
    """Returns a pytree of arrays as specs say, which jax itself does for axes that are not of type Explicit."""
    if AxisType.Explicit not in mesh.axis_types:
        return arrays

    def lay(spec: PartitionSpec, part: Any) -> Any:
        return jax.tree.map(lambda array: jax.sharding.reshard(array, NamedSharding(mesh, spec)), part)

    return jax.tree.map(lay, specs, arrays, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _put(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array as a sharding says; `jax.device_put` would compare all of it between processes."""
    is_whole_here = getattr(array, "is_fully_addressable", True)
    if sharding.is_fully_addressable or not is_whole_here:
        return jax.device_put(array, sharding)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns the same devices with axes of type Auto: a step may give arrays laid in any way."""
    return Mesh(mesh.devices, mesh.axis_names)


def _require_divides(axis: str, size: int, num_heads: int, num_kv_heads: int) -> None:
    if num_heads % size:
        rule = f"be a multiple of {size}, the size of mesh axis {axis!r}"
        raise refuse("num_heads", rule, num_heads, "Each device has as many query heads.")
    if num_kv_heads % size and size % num_kv_heads:
        rule = f"be a multiple or a divisor of {size}, the size of mesh axis {axis!r}"
        raise refuse("num_kv_heads", rule, num_kv_heads, "A kv head is not cut; it can lie on several devices.")


def _cut_axis(mesh: Mesh, axis: str, size: int) -> tuple[Mesh, str]:
    """Returns the same devices with an axis cut into (size, the rest), and the name of the second part."""
    place = mesh.axis_names.index(axis)
    copies = f"{axis}_copies"
    shape = mesh.devices.shape
    devices = np.reshape(mesh.devices, (*shape[:place], size, shape[place] // size, *shape[place + 1 :]))
    names = (*mesh.axis_names[:place], axis, copies, *mesh.axis_names[place + 1 :])
    return Mesh(devices, names), copies
