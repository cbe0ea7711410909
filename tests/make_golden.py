"""Writes tests/golden/inkling_small.npz from Hugging Face's Inkling on a CPU: weights, tokens, every layer's attention.

Run it with torch and transformers >= 5.14 (any Python; neither jax nor this package is needed):

    python tests/make_golden.py

Tokens come from the model's own greedy `generate`, one prompt after the other. Everything else is recorded in one
forward pass over each whole sequence, so that no cache of theirs takes part.
"""
# The extra `hf` is not installed where types are checked.
# pyright: reportMissingImports=false

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hf_model import make_model, make_prompts
from transformers.models.inkling import modeling_inkling

PATH = Path(__file__).parent / "golden" / "inkling_small.npz"
_PROMPT_LENGTHS, _NEW_TOKENS = (70, 17, 5), 8
_LEAST_MARGIN = 1e-3  # between the best and the second logit, far over what rounding moves


def main() -> None:
    """Writes the file."""
    model = make_model("small")
    golden = {f"weights/{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    for number, prompt in enumerate(make_prompts("small", _PROMPT_LENGTHS)):
        golden |= {f"sequence{number}/{name}": array for name, array in _record(model, prompt).items()}
    versions = {"transformers": np.array(transformers.__version__), "torch": np.array(torch.__version__)}
    PATH.parent.mkdir(exist_ok=True)
    arrays: dict[str, Any] = golden | versions
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH}: {PATH.stat().st_size / 1e6:.2f} MB, transformers {transformers.__version__}")


@torch.no_grad()
def _record(model: Any, prompt: list[int]) -> dict[str, np.ndarray]:
    """Returns the tokens of a prompt and its answer, their logits and what each layer's attention took and gave."""
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=_NEW_TOKENS, do_sample=False)
    calls: list[dict[str, np.ndarray]] = []
    eager = modeling_inkling.eager_attention_forward

    def recording(module: Any, query: Any, key: Any, value: Any, mask: Any, position_bias: Any, **more: Any) -> Any:
        result = eager(module, query, key, value, mask, position_bias=position_bias, **more)
        rows = {"q": query[0].transpose(0, 1), "k": key[0].transpose(0, 1), "v": value[0].transpose(0, 1)}
        rows |= {"rel_logits": _by_distance(position_bias[0], module.rel_extent), "out": result[0][0]}
        calls.append({name: tensor.contiguous().numpy() for name, tensor in rows.items()})
        return result

    modeling_inkling.eager_attention_forward = recording
    try:
        logits = model(tokens, use_cache=False).logits[0]
    finally:
        modeling_inkling.eager_attention_forward = eager
    _require_the_same_choice(tokens[0], logits, len(prompt))
    stacked = {f"layer{i}/{name}": array for i, call in enumerate(calls) for name, array in call.items()}
    return {"tokens": tokens[0].numpy(), "prompt": np.array(len(prompt)), "logits": logits.numpy(), **stacked}


def _by_distance(position_bias: Any, rel_extent: int) -> Any:
    """Returns [rows, heads, rel_extent] from the dense bias [heads, rows, keys]; 0 past a row's first key."""
    row = torch.arange(position_bias.shape[1])[:, None]
    key = row - torch.arange(rel_extent)[None]
    bias = position_bias[:, row, key.clamp(min=0)]
    return bias.masked_fill(key < 0, 0.0).transpose(0, 1)


def _require_the_same_choice(tokens: Any, logits: Any, prompt: int) -> None:
    """Raises where a pass over the whole sequence would not have chosen what `generate` chose, or only just."""
    answered = logits[prompt - 1 : -1]
    best = answered.topk(2).values
    if (
        not bool((answered.argmax(-1) == tokens[prompt:]).all())
        or float((best[:, 0] - best[:, 1]).min()) < _LEAST_MARGIN
    ):
        raise ValueError("generate and a whole pass must choose the same tokens by a margin. Take another seed.")


if __name__ == "__main__":
    main()
