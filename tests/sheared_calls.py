"""A call on a sheared table, from one on a plain table."""

from typing import Any

import jax.numpy as jnp

import inkling_pallas as ip

LENGTHS = ("cu_seqlens_q", "cache_seqlens", "kv_offset", "total_seqlens")


def shear_call(call: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Returns a call with its bias sheared for its own lengths."""
    lengths = {name: jnp.asarray(call[name]) for name in LENGTHS if call.get(name) is not None}
    return dict(call, rel_logits=ip.shear(jnp.asarray(call["rel_logits"]), **lengths, **how))
