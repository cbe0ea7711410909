"""The bias as a function of one score for FlashAttention-4, in its CuTe DSL."""

import importlib
from typing import Any


def make_score_mod(rel_extent: int) -> Any:
    """Returns the score_mod whose only auxiliary tensor is rel_logits [num_tokens, num_heads, rel_extent].

    Raises:
      ImportError: without the DSL.
    """
    cutlass: Any = importlib.import_module("cutlass")
    cute: Any = importlib.import_module("cutlass.cute")

    @cute.jit
    def add_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        rel_logits = aux_tensors[0]
        dist = seqlen_info.seqlen_k - seqlen_info.seqlen_q + q_idx[0] - kv_idx[0]
        near = cutlass.max(cutlass.min(dist, rel_extent - 1), 0)
        bias = cute.make_rmem_tensor(1, rel_logits.element_type)
        bias[0] = rel_logits[seqlen_info.offset_q + q_idx[0], h[0], near]
        share = cutlass.Float32(0.0)
        if near == dist:
            share = cutlass.Float32(1.0)
        return score + bias.load().to(cutlass.Float32) * share

    return add_bias
