"""Small random Inkling models from Hugging Face transformers (>= 5.14), for golden files and the live check.

torch and transformers are imported here alone, with `hf_attention`, `hf_client` and `make_golden`.
"""
# The extra `hf` is not installed where types are checked.
# pyright: reportMissingImports=false

from typing import Any

import torch
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingForCausalLM

# Both have five local layers and a global one, a dense layer among experts, and log scaling that starts early.
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "d_rel": 16,
    "log_scaling_n_floor": 32,
    "route_scale": 2.0,
    "logits_mup_width_multiplier": 2.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
# "small" fits a CPU. "kernels" has shapes that the Hopper kernels take, and every expert takes part in every token: in
# bfloat16 rounding would choose between two that score alike, and no limit could tell that from an error.
CONFIGS: dict[str, dict[str, Any]] = {
    "small": _SHARED
    | {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "rel_extent": 48,
        "sliding_window_size": 16,
        "initializer_range": 0.15,
    },
    "kernels": _SHARED
    | {
        "vocab_size": 512,
        "hidden_size": 256,
        "num_experts_per_tok": 4,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 128,
        "rel_extent": 128,
        "sliding_window_size": 128,
        "initializer_range": 0.08,
    },
}


def make_model(name: str, *, dtype: Any = torch.float32, device: str = "cpu", seed: int = 0) -> Any:
    """Returns a model of random weights, in evaluation mode; the same for a seed on every device.

    What transformers starts at one or zero (norms, scales, the router's correction) is made random, too: a step that
    leaves such a piece out must not match.
    """
    torch.manual_seed(seed)
    model = InklingForCausalLM(InklingTextConfig(**CONFIGS[name])).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point() and tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_(0.25 * torch.randn(tensor.shape, generator=generator))
            elif "sconv" in key:
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model.to(device=device, dtype=dtype)


def make_prompts(name: str, lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Returns random token ids, none of them the padding's."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, CONFIGS[name]["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
