"""The device that a call runs on, and what is known of it."""

import ctypes
import dataclasses
import functools
from typing import Any

import jax


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
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0] if chosen else jax.devices()[0]


def device_capability(device: Any = None) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA device (the default one if None), or None for any other device."""
    text = getattr(device or default_device(), "compute_capability", None)
    parts = str(text).split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(p.isdigit() for p in parts) else None


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
