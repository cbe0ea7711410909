"""The device that a call runs on, and what is known of it."""

from typing import Any

import jax


def default_device() -> Any:
    """Returns the device that a jitted call without placed arguments runs on."""
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0] if chosen else jax.devices()[0]


def device_capability(device: Any = None) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA device (the default one if None), or None for any other device."""
    text = getattr(device or default_device(), "compute_capability", None)
    parts = str(text).split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(p.isdigit() for p in parts) else None
