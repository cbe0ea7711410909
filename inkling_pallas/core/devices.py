"""The device that a call runs on, and what is known of it."""

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """What decides how kernels cut their work on a card; sizes in bytes."""

    num_sms: int
    cta_smem: int  # shared memory that one CTA may have
    l2_cache: int

    def smem_of(self, ctas: int) -> int:
        """Returns the shared memory of each of several CTAs on an SM; the driver keeps 1 KiB for each."""
        return (self.cta_smem + _RESERVED_SMEM) // ctas - _RESERVED_SMEM


_RESERVED_SMEM = 1024
# Of what is compiled where no card is: the cards that configurations were measured on, or are meant for.
H200 = Card(num_sms=132, cta_smem=227 * 1024, l2_cache=60 * 2**20)
B200 = Card(num_sms=148, cta_smem=227 * 1024, l2_cache=126 * 2**20)


def default_device() -> Any:
    """Returns the device that a jitted call without placed arguments runs on."""
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen or None)[0]


class Place(NamedTuple):
    """The device that a call runs on; a guess where it is traced, as it may be compiled for another."""

    device: Any
    is_guess: bool


def place_of(arrays: Iterable[Any]) -> Place:
    """Returns where a call runs: as in any call of jax, where one of its arrays was put, or on the default device.

    Args:
      arrays: those of a call, traced, concrete or jax.ShapeDtypeStruct; what is no array counts for nothing.
    """
    placed = None
    for array in arrays:
        if array is None:
            continue
        array = getattr(array, "table", array)  # of ShearedLogits
        if isinstance(array, jax.core.Tracer):
            return Place(_likely_device(default_device()), is_guess=True)
        placed = placed or _put_on(array)
    return Place(placed or default_device(), is_guess=False)


def _put_on(array: Any) -> Any:
    """Returns the device that an array was put on; None for one that goes where the others are."""
    if isinstance(array, jax.Array):
        return next(iter(array.devices())) if array.committed else None
    sharding = getattr(array, "sharding", None)  # of jax.ShapeDtypeStruct
    is_abstract = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
    return None if sharding is None or is_abstract else next(iter(sharding.device_set))


@functools.cache
def _likely_device(default: Any) -> Any:
    """Returns an NVIDIA GPU where there is one: what is compiled for another device has a branch of its own."""
    if device_capability(default) is not None:
        return default
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # none in this process
        return default


def device_capability(device: Any = None) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA device (the default one if None), or None for any other device."""
    text = getattr(device or default_device(), "compute_capability", None)
    parts = str(text).split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(p.isdigit() for p in parts) else None


def spread(arrays: Mapping[str, Any]) -> str | None:
    """Returns why no kernel may take arrays: they lie on several devices, not cut by `jax.shard_map`.

    XLA cannot cut a kernel, so it would gather the whole cache on each device. What `in_shardings` of a jit around the
    call say is not known here; `for_card` refuses it.

    Args:
      arrays: the arrays of a call by argument, traced, concrete or jax.ShapeDtypeStruct.
    """
    context = jax.sharding.get_abstract_mesh()
    left = 1 if context.empty else _devices_left(context)
    if left > 1:
        return SPREAD.format(name="the mesh in context", count=f"{left} devices")
    if AxisType.Manual in context.axis_types:
        return next((CHECKED for array in arrays.values() if _is_checked(array)), None)
    for name, array in arrays.items():
        count = _devices_of(array)
        if count > 1:
            return SPREAD.format(name=name, count=f"{count} devices")
    return None


SPREAD = (
    "{name} must lie on one device, or be cut by jax.shard_map; got {count}. For a kernel XLA would gather whole "
    "arrays on each: use AttentionMesh."
)


CHECKED = "jax.shard_map must have check_vma=False around a kernel, whose results do not say over which axes they vary."


def _is_checked(array: Any) -> bool:
    """Returns whether a `jax.shard_map` follows over which of its axes an array varies."""
    kind = getattr(jax.typeof(array), "manual_axis_type", None) if isinstance(array, jax.core.Tracer) else None
    return kind is not None and bool(kind.varying)


def on_auto_axes(function: Callable[..., Any], arrays: Any, like: Any, has_second: bool) -> Callable[..., Any]:
    """Returns a function of a pytree of arrays that lets XLA lay what it makes, where a mesh has axes of type Explicit.

    Args:
      function: returns (an array of the first axes of `like`, the same or None).
      arrays: the pytree.
      like: the array as which the results lie.
      has_second: whether the second result is an array.
    """
    shardings = [jax.typeof(x).sharding for x in jax.tree.leaves(arrays)]
    meshes = [s.mesh for s in shardings if AxisType.Explicit in s.mesh.axis_types]
    if not meshes:
        return function
    spec = jax.typeof(like).sharding.spec
    lies = tuple(NamedSharding(meshes[0], PartitionSpec(*spec[:axes])) for axes in (3, 2))
    return jax.sharding.auto_axes(function, out_sharding=lies if has_second else (lies[0], None))


def _devices_of(array: Any) -> int:
    """Returns over how many devices XLA, and not a `jax.shard_map`, lays an array."""
    array = getattr(array, "table", array) if not isinstance(array, jax.Array) else array  # of ShearedLogits
    if isinstance(array, jax.core.Tracer):
        return _devices_left(jax.typeof(array).sharding.mesh)
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return _devices_left(sharding.mesh)
    return 1 if sharding is None else sharding.num_devices


def _devices_left(mesh: AbstractMesh) -> int:
    """Returns the devices of a mesh along the axes that no `jax.shard_map` has cut."""
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in axes if kind != AxisType.Manual)


def card_of(device: Any = None) -> Card | None:
    """Returns the facts of an NVIDIA device (the default one if None), or None for any other device."""
    device = device or default_device()
    capability = device_capability(device)
    return None if capability is None else _read_card(device, capability)


@functools.cache
def _read_card(device: Any, capability: tuple[int, int]) -> Card:
    """Returns what the device says of itself, and what a card of its generation has where it says nothing."""
    usual = H200 if capability[0] < 10 else B200
    return Card(
        num_sms=getattr(device, "core_count", usual.num_sms),
        cta_smem=getattr(device, "shared_memory_per_block_optin", usual.cta_smem),
        l2_cache=_l2_cache(device) or usual.l2_cache,
    )


def _l2_cache(device: Any) -> int | None:
    """Returns the bytes of a device's L2 cache by the driver, which jax does not ask; None without a driver."""
    attribute, number, size = 38, getattr(device, "local_hardware_id", None), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle = ctypes.c_int()
    if number is None or driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), number):
        return None
    return None if driver.cuDeviceGetAttribute(ctypes.byref(size), attribute, handle) else size.value
