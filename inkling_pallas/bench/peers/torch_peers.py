"""Peers that need torch, in a process of its own: `python -m inkling_pallas.bench.peers.torch_peers PEER [busy]`.

It reads names of workloads, a line each, and answers each with a line of JSON: the times in microseconds, or `reason`.
They give an attention library the operator's formula as a function of one score, as serving stacks do; `fa4_nobias`
leaves it out.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from inkling_pallas.bench.energy import Meter
from inkling_pallas.bench.peers.torch_inputs import Inputs, contiguous, time_sets
from inkling_pallas.bench.targets import NO_BIAS
from inkling_pallas.bench.workloads import WORKLOADS
from inkling_pallas.testing.cases import Case

ANSWER = "answer: "
BUSY = "busy"
# Makes the call of a set of inputs.
_Make = Callable[[Inputs], Callable[[], Any]]


def flex_rel(torch: Any, case: Case, compiled: bool = True) -> _Make:
    """Returns torch's FlexAttention with the bias as score_mod, over contiguous keys padded to the longest sequence."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    attend = torch.compile(flex.flex_attention, dynamic=False) if compiled else flex.flex_attention

    def make(inputs: Inputs) -> Callable[[], Any]:
        device = inputs.q.device
        q_lens, kv_lens = (torch.tensor(lens, device=device) for lens in (case.q_lens, case.kv_lens))
        starts = torch.tensor(np.cumsum((0, *case.q_lens[:-1])), device=device)
        rows = (starts[:, None] + torch.arange(max(case.q_lens), device=device)).clamp(max=case.num_tokens - 1)
        q = inputs.q[rows].transpose(1, 2)
        k, v = (contiguous(cache, inputs.table).transpose(1, 2) for cache in (inputs.keys, inputs.values))
        left = case.window_size[0] if case.window_size[0] >= 0 else max(case.kv_lens)

        def distance(b: Any, i: Any, j: Any) -> Any:
            return kv_lens[b] - q_lens[b] + i - j

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            dist = distance(b, i, j)
            return (dist >= 0) & (dist <= left) & (i < q_lens[b])

        def add_bias(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            dist = distance(b, i, j)
            row = (starts[b] + i).clamp(max=case.num_tokens - 1)
            bias = inputs.rel_logits[row, h, dist.clamp(0, case.rel_extent - 1)]
            return torch.where((dist >= 0) & (dist < case.rel_extent), score + bias, score)

        mask = flex.create_block_mask(visible, len(case.q_lens), None, q.shape[2], k.shape[2], device=device)
        sequence, index = np.nonzero(np.arange(max(case.q_lens)) < np.array(case.q_lens)[:, None])
        places = torch.tensor(sequence, device=device), torch.tensor(index, device=device)

        def call() -> Any:
            out = attend(q, k, v, add_bias, mask, scale=1 / case.head_dim, enable_gqa=True)
            return out.transpose(1, 2)[places] if len(case.q_lens) > 1 else out[0].transpose(0, 1)

        return call

    return make


def fa4_rel(torch: Any, case: Case) -> _Make:
    """Returns FlashAttention-4 over the paged cache with the bias as score_mod."""
    add_bias = importlib.import_module("inkling_pallas.bench.peers.fa4_score_mod").make_score_mod(case.rel_extent)
    return _fa4(torch, case, lambda inputs: {"score_mod": add_bias, "aux_tensors": [inputs.rel_logits]})


def fa4_nobias(torch: Any, case: Case) -> _Make:
    """Returns FlashAttention-4 over the paged cache without the bias."""
    return _fa4(torch, case, lambda inputs: {})


def _fa4(torch: Any, case: Case, bias: Callable[[Inputs], dict[str, Any]]) -> _Make:
    library = importlib.import_module("flash_attn.cute.interface")
    left = case.window_size[0]

    def make(inputs: Inputs) -> Callable[[], Any]:
        device = inputs.q.device
        offsets = torch.tensor(np.cumsum((0, *case.q_lens)), dtype=torch.int32, device=device)
        kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)

        def call() -> Any:
            result = library.flash_attn_varlen_func(
                inputs.q,
                inputs.keys,
                inputs.values,
                cu_seqlens_q=offsets,
                max_seqlen_q=max(case.q_lens),
                max_seqlen_k=max(case.kv_lens),
                seqused_k=kv_lens,
                page_table=inputs.table,
                softmax_scale=1 / case.head_dim,
                causal=True,
                window_size=(left, 0) if left >= 0 else (None, None),
                **bias(inputs),
            )
            return result[0] if isinstance(result, tuple) else result

        return call

    return make


TORCH_PEERS: Mapping[str, Callable[[Any, Case], _Make]] = MappingProxyType(
    {"flex_rel": flex_rel, "fa4_rel": fa4_rel, "fa4_nobias": fa4_nobias}
)


def answer(name: str, case: Case, meter: Meter | None = None) -> dict[str, Any]:
    """Returns the times of a peer on a case, without rests where there is a meter, or the reason why there are none."""
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return {"reason": "torch sees no GPU"}
        importlib.import_module("torch._dynamo").reset()
        with torch.inference_mode():
            make = TORCH_PEERS[name](torch, case)
            return time_sets(torch, case, make, with_bias=not name.endswith(NO_BIAS), meter=meter)
    except Exception as error:  # whatever a library raises is the answer
        lines = str(error).strip().splitlines() or [""]
        return {"reason": f"{type(error).__name__}: {lines[0][:300]}"}


def main(argv: Sequence[str]) -> int:
    """Answers the workloads named on stdin."""
    meter = Meter() if argv[1:] == [BUSY] else None
    for line in sys.stdin:
        print(ANSWER + json.dumps(answer(argv[0], WORKLOADS[line.strip()], meter)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
