"""Hugging Face's Inkling with this package as its attention, against its own eager attention, step by step.

Needs torch and transformers >= 5.14 (extra `hf`). Several prompts in chunks, then greedy decoding, all through paged
caches; both models are given the tokens that the eager one chooses. An error is measured per row: the 2-norm of the
difference of its logits over that of the logits. float32: at most 1e-4 from eager, and the same tokens. bfloat16: at
each step at most twice as far from the same weights in float32 as eager's worst row of the run, for both are rounded.

    python tests/hf_client.py --config small
    python tests/hf_client.py --config kernels --expect hopper   # on a Hopper card; both kinds of layer, every step
"""
# The extra `hf` is not installed where types are checked.
# pyright: reportMissingImports=false

import argparse
import copy
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch takes memory of the same card

import jax
import torch
import transformers
from hf_attention import PagedAttention, Taken
from hf_model import make_model, make_prompts

import inkling_pallas as ip


class Setting(NamedTuple):
    """How a config is run."""

    dtype: Any
    prompts: tuple[int, ...]
    chunks: tuple[int, ...]  # columns of the padded prompts per step
    new_tokens: int
    block_size: int


# The longest prompt is over the extents and windows, and is prefilled in chunks; the shortest starts in the last one.
SETTINGS = {
    "small": Setting(torch.float32, (70, 17, 5), (40, 29, 1), 8, 8),
    "kernels": Setting(torch.bfloat16, (300, 141, 7), (160, 139, 1), 8, 16),
}
_FLOAT32_LIMIT = 1e-4


class Step(NamedTuple):
    """The worst row errors of a step."""

    columns: int
    error: float  # ours against eager
    ours: float  # against float32
    eager: float  # against float32
    same_tokens: bool


class Outcome(NamedTuple):
    """All steps of a run."""

    steps: list[Step]
    taken: list[Taken]
    failures: list[str]


@torch.no_grad()
def run(name: str, *, device: str, layout: str = "separate", backend: str = "auto", expect: str = "") -> Outcome:
    """Serves a config's prompts with both attentions.

    Args:
      name: of the config.
      device: torch's; jax runs on its default one.
      layout: of the paged caches.
      backend: of the operator.
      expect: a backend that every call must take; "" for any.
    """
    setting = SETTINGS[name]
    prompts = make_prompts(name, setting.prompts)
    eager = make_model(name, device=device, dtype=setting.dtype)
    truth = copy.deepcopy(eager).float()
    ours = PagedAttention(
        copy.deepcopy(eager),
        prompts,
        max_new_tokens=setting.new_tokens,
        block_size=setting.block_size,
        layout=layout,
        backend=backend,
    )
    width = max(setting.prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    caches = [transformers.DynamicCache(config=model.config) for model in (eager, truth)]
    steps: list[Step] = []
    done, chunks = 0, list(setting.chunks) + [1] * setting.new_tokens
    for chunk in chunks:
        new, seen = ids[:, done : done + chunk], mask[:, : done + chunk]
        mine = ours.step(new, seen)
        theirs, exact = (
            model(input_ids=new, attention_mask=seen, past_key_values=cache, use_cache=True).logits
            for model, cache in zip((eager, truth), caches, strict=True)
        )
        steps.append(_compare(mine, theirs, exact, seen[:, done:].bool()))
        done += chunk
        if done >= width:
            ids = torch.cat([ids, theirs[:, -1:].argmax(-1)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return Outcome(steps, ours.taken, _failures(steps, ours.taken, setting.dtype, expect))


def _compare(mine: Any, theirs: Any, exact: Any, live: Any) -> Step:
    """Returns the worst errors of the live rows of a step."""
    mine, theirs, exact = (x[live].float() for x in (mine, theirs, exact))
    pairs = ((mine, theirs), (mine, exact), (theirs, exact))
    errors = [float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()) for a, b in pairs]
    return Step(live.shape[1], *errors, same_tokens=bool((mine.argmax(-1) == theirs.argmax(-1)).all()))


def _failures(steps: list[Step], taken: list[Taken], dtype: Any, expect: str) -> list[str]:
    rounded = dtype != torch.float32
    limit = 2 * max(step.eager for step in steps) if rounded else _FLOAT32_LIMIT
    found = []
    for i, step in enumerate(steps):
        error = step.ours if rounded else step.error
        if not error <= limit:
            found.append(f"step {i}: a row is {error:.2e} off, the limit is {limit:.2e}")
        if not rounded and not step.same_tokens:
            found.append(f"step {i}: another token is the largest")
    if expect:
        found += [f"{call} is not for {expect}" for call in taken if call.backend != expect]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table; returns 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=SETTINGS, required=True)
    parser.add_argument("--layout", default="separate", help="separate, packed or interleaved")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--expect", default="", help="the backend that every call must take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="a JSON file to write")
    options = parser.parse_args(argv)
    outcome = run(
        options.config,
        device=options.device,
        layout=options.layout,
        backend=options.backend,
        expect=options.expect,
    )
    for i, step in enumerate(outcome.steps):
        errors = f"ours - eager {step.error:.1e}, ours - float32 {step.ours:.1e}, eager - float32 {step.eager:.1e}"
        print(f"step {i:2}: {step.columns:4} columns, {errors}, {'same' if step.same_tokens else 'other'} tokens")
    for call in dict.fromkeys(outcome.taken):
        print(f"{'local' if call.is_local else 'global'}, max_seqlen_q {call.max_seqlen_q}: {call.backend}")
    print("\n".join(outcome.failures) or "all within their limits")
    if options.out:
        Path(options.out).write_text(json.dumps(_as_json(options, outcome), indent=1) + "\n")
    return int(bool(outcome.failures))


def _as_json(options: argparse.Namespace, outcome: Outcome) -> dict[str, Any]:
    versions = {"inkling_pallas": ip.__version__, "jax": jax.__version__, "torch": torch.__version__}
    return {
        "meta": versions
        | {"transformers": transformers.__version__, "device": jax.devices()[0].device_kind}
        | {name: getattr(options, name) for name in ("config", "layout", "backend", "expect")},
        "steps": [step._asdict() for step in outcome.steps],
        "taken": [call._asdict() for call in dict.fromkeys(outcome.taken)],
        "failures": outcome.failures,
    }


if __name__ == "__main__":
    sys.exit(main())
