"""A paged cache of keys and values in the layout that a stack already has."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from inkling_pallas.core import cache_layouts
from inkling_pallas.core.describe import one_line_repr
from inkling_pallas.core.errors import (
    float_dtype,
    refuse,
    require_array,
    require_cache_floats,
    require_plain,
    static_int,
)
from inkling_pallas.core.export import serializable


@serializable
@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PagedKVCache:
    """Keys and values in pages, in one of three layouts; a pytree whose leaves are the arrays.

    Make one with `separate`, `packed`, `interleaved` or `zeros`, and pass it as `key_cache` with `value_cache=None`:
    no layout is copied or converted. Under `jax.vmap` and `jax.lax.scan` the leaves may have leading axes.

    Attributes:
      arrays: (keys, values) for "separate", else one array that holds both.
      layout: "separate", "packed" or "interleaved".

    Example:
      >>> import jax.numpy as jnp, inkling_pallas as ip
      >>> cache = ip.PagedKVCache.packed(jnp.zeros((9, 2, 16, 256), jnp.bfloat16))
      >>> cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_dim
      (9, 16, 2, 128)
      >>> cache.copy_to("separate").arrays[1].shape
      (9, 16, 2, 128)
    """

    arrays: tuple[jax.Array, ...]
    layout: str
    __repr__ = one_line_repr

    @classmethod
    def separate(cls, keys: Any, values: Any) -> Self:
        """Returns a cache of two arrays [num_blocks, block_size, num_kv_heads, head_dim].

        Args:
          keys: bf16, f16 or f32; arrays may be jax.ShapeDtypeStruct where a call takes those.
          values: like keys.

        Raises:
          ValueError: for a wrong shape or dtype.
        """
        _require_cache_array("keys", keys, cache_layouts.AXES["separate"])
        require_plain("values", values)
        require_array("values", values, tuple(keys.shape), np.dtype(keys.dtype).name, "It is an array like keys.")
        return cls(arrays=(keys, values), layout="separate")

    @classmethod
    def packed(cls, array: Any) -> Self:
        """Returns a cache of one array [num_blocks, num_kv_heads, block_size, 2 * head_dim], keys in the first half.

        Args:
          array: bf16, f16 or f32. This is what vLLM allocates.

        Raises:
          ValueError: for a wrong shape or dtype.
        """
        _require_cache_array("array", array, cache_layouts.AXES["packed"])
        _require_even("array", array, 3, "2 * head_dim")
        return cls(arrays=(array,), layout="packed")

    @classmethod
    def interleaved(cls, array: Any) -> Self:
        """Returns a cache of one array [num_blocks, block_size, 2 * num_kv_heads, head_dim]: k0, v0, k1, v1 ...

        Args:
          array: bf16, f16 or f32. This is what tpu-inference and sglang-jax allocate.

        Raises:
          ValueError: for a wrong shape or dtype.
        """
        _require_cache_array("array", array, cache_layouts.AXES["interleaved"])
        _require_even("array", array, 2, "2 * num_kv_heads")
        return cls(arrays=(array,), layout="interleaved")

    @classmethod
    def zeros(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = jnp.bfloat16,
        layout: str = "separate",
    ) -> Self:
        """Returns a cache of zeros.

        Args:
          num_blocks: pages in the pool.
          block_size: tokens of a page.
          num_kv_heads: kv heads on this device.
          head_dim: elements of a key.
          dtype: bf16, f16 or f32.
          layout: "separate", "packed" or "interleaved".

        Raises:
          ValueError: for a size that is no int >= 1, or an unknown dtype or layout.
        """
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        dims = cache_layouts.CacheDims(**{name: static_int(name, size, 1) for name, size in sizes.items()})
        shape = cache_layouts.array_shape(_known_layout(layout), dims)
        float_dtype("dtype", dtype, "It is that of q.")
        return cls(arrays=tuple(jnp.zeros(shape, dtype) for _ in range(_num_arrays(layout))), layout=layout)

    @property
    def num_blocks(self) -> int:
        """Pages in the pool."""
        return self._dims.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self._dims.block_size

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self._dims.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a key, and of a value."""
        return self._dims.head_dim

    @property
    def dtype(self) -> np.dtype:
        """Dtype of keys and values."""
        return np.dtype(self.arrays[0].dtype)

    @property
    def _dims(self) -> cache_layouts.CacheDims:
        return cache_layouts.cache_dims(self.layout, self.arrays[0].shape)

    def copy_to(self, layout: str) -> "PagedKVCache":
        """Returns the cache in another layout: a copy of all of it, for setting up and tests, not for a step.

        Args:
          layout: "separate", "packed" or "interleaved".

        Raises:
          ValueError: for an unknown layout.
        """
        arrays = cache_layouts.join(
            _known_layout(layout), *cache_layouts.split(self.layout, tuple(map(jnp.asarray, self.arrays)))
        )
        return PagedKVCache(arrays=arrays, layout=layout)

    def partition_spec(self, axis: str) -> PartitionSpec:
        """Returns the spec of each array with kv heads sharded over a mesh axis, as tensor parallelism wants it.

        Args:
          axis: name of the mesh axis; its size divides num_kv_heads.
        """
        return PartitionSpec(*(axis if i == cache_layouts.HEAD_AXIS[self.layout] else None for i in range(4)))


def unpack_cache(key_cache: Any, value_cache: Any) -> tuple[Any, Any, str]:
    """Returns (key_cache, value_cache, layout) of a call; one array with value_cache None where it holds both."""
    if not isinstance(key_cache, PagedKVCache):
        return key_cache, value_cache, "separate"
    if value_cache is not None:
        rule = "be None where key_cache is a PagedKVCache"
        raise refuse("value_cache", rule, type(value_cache).__name__, "That cache holds the values, too.")
    arrays = key_cache.arrays
    return arrays[0], arrays[1] if len(arrays) == 2 else None, key_cache.layout


def _num_arrays(layout: str) -> int:
    return 2 if layout == "separate" else 1


def _known_layout(layout: Any) -> str:
    if layout not in cache_layouts.LAYOUTS:
        raise refuse(
            "layout", f"be one of {', '.join(map(repr, cache_layouts.LAYOUTS))}", repr(layout), "See PagedKVCache."
        )
    return layout


def _require_cache_array(name: str, array: Any, shape: tuple[str, ...]) -> None:
    require_plain(name, array)
    dtype = require_cache_floats(name, array)
    require_array(name, array, shape, dtype, "Its axes are the layout's; see PagedKVCache.")


def _require_even(name: str, array: Any, axis: int, what: str) -> None:
    if array.shape[axis] % 2:
        advice = "K and V lie side by side on that axis."
        raise refuse(name, f"have an even axis {axis}, being {what}", tuple(array.shape), advice)
