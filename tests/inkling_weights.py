"""Weights of Inkling's text decoder: from the names of transformers' checkpoints to those of `inkling_block`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

# Ours: theirs, in a layer.
_NAMES = {
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvro"},
    **{f"{name}_sconv": f"self_attn.{name}_sconv.conv1d.weight" for name in "kv"},
    **{f"{name}_norm": f"self_attn.{name}_norm.weight" for name in "qk"},
    "rel_proj": "self_attn.rel_logits_proj.proj",
    "attn_norm": "input_layernorm.weight",
    "attn_sconv": "attn_sconv.conv1d.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_sconv": "mlp_sconv.conv1d.weight",
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "mlp_scale": "mlp.global_scale",
    "router": "mlp.gate.weight",
    "router_scale": "mlp.gate.global_scale",
    "router_correction": "mlp.gate.e_score_correction_bias",
}


def take_weights(checkpoint: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Returns the weights under this file's names, from arrays under those of transformers' checkpoints."""

    def take(prefix: str, names: dict[str, str]) -> dict[str, Any]:
        return {
            ours: jnp.asarray(checkpoint[prefix + name]) for ours, name in names.items() if prefix + name in checkpoint
        }

    layers = [take(f"model.layers.{i}.", _NAMES) for i in range(num_layers)]
    for i, layer in enumerate(layers):
        layer |= {name: weight[:, 0] for name, weight in layer.items() if name.endswith("sconv")}
        if "router" in layer:
            layer |= _all_experts(checkpoint, f"model.layers.{i}.mlp.")
    top = {"embed": "model.embed_tokens.weight", "embed_norm": "model.embed_norm.weight"}
    return take("", top | {"norm": "model.norm.weight", "unembed": "lm_head.weight"}) | {"layers": layers}


def _all_experts(checkpoint: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the routed experts, then the shared ones: gates and ups [e, inner, hidden], downs [e, hidden, inner]."""
    gate, up = jnp.split(jnp.asarray(checkpoint[prefix + "experts.gate_up_proj"]), 2, axis=1)
    routed = {"gate": gate, "up": up, "down": jnp.asarray(checkpoint[prefix + "experts.down_proj"])}
    shared = {name: jnp.asarray(checkpoint[f"{prefix}shared_experts.{name}_proj"]) for name in routed}
    return {f"{name}s": jnp.concatenate([routed[name], shared[name]]) for name in routed}
