"""Attention libraries that jax users have, without the bias: floors for a kernel that must also add one.

They read contiguous keys and values that were laid out before. What one call of them cannot do is computed by several
in one jitted function; `PeerCall.form` says how.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.bench.clocks import Rotation
from inkling_pallas.bench.peers.base import PeerCall, PeerSkippedError, require_gpu, require_memory
from inkling_pallas.bench.peers.contiguous import Part, contiguous, packed_rows, parts_of
from inkling_pallas.testing.cases import Case

_Arrays = tuple[jax.Array, jax.Array, jax.Array]
# Prepares (q, k, v) for a call, before anything is timed; the call; what of its result are the part's rows.
_Step = tuple[Callable[[_Arrays], _Arrays], Callable[..., jax.Array], Callable[[jax.Array], jax.Array]]


def jax_cudnn_nobias(
    case: Case, sets: Sequence[Mapping[str, Any]], implementation: str = "cudnn", together: bool = True
) -> PeerCall:
    """Returns cuDNN's flash attention through jax; prompts of several lengths are padded to the longest."""
    if implementation == "cudnn":
        require_gpu("cuDNN")
    attend = functools.partial(
        jax.nn.dot_product_attention,  # pyright: ignore[reportCallIssue]
        scale=sets[0]["softmax_scale"],
        implementation=implementation,
    )
    parts = parts_of(case, together=together)
    return _peer_call(case, sets, parts, [_cudnn_steps(part, case.window_size[0], attend) for part in parts])


def jax_cudnn_each_nobias(case: Case, sets: Sequence[Mapping[str, Any]], implementation: str = "cudnn") -> PeerCall:
    """Returns cuDNN's flash attention through jax, a call for each prompt."""
    _require_several_prompts(case, "jax_cudnn_nobias")
    return jax_cudnn_nobias(case, sets, implementation, together=False)


def tokamax_nobias(case: Case, sets: Sequence[Mapping[str, Any]], implementation: str = "mosaic") -> PeerCall:
    """Returns tokamax's Mosaic GPU attention, a call for each prompt."""
    attend = functools.partial(
        _tokamax("tokamax", implementation).dot_product_attention,
        scale=sets[0]["softmax_scale"],
        implementation=implementation,
    )
    parts = parts_of(case, together=False)
    return _peer_call(case, sets, parts, [_tokamax_steps(part, case.window_size[0], attend) for part in parts])


def tokamax_packed_nobias(
    case: Case, sets: Sequence[Mapping[str, Any]], implementation: str = "mosaic_gpu"
) -> PeerCall:
    """Returns tokamax's Mosaic GPU attention over all prompts as one sequence, whose mask has a first key for each row.

    The public function takes no such mask, the operator behind it does.
    """
    _require_several_prompts(case, "tokamax_nobias")
    operator = _tokamax("tokamax._src.ops.attention.api", implementation).IMPLEMENTATIONS[implementation]
    masks = importlib.import_module("tokamax._src.ops.attention.base")
    first_key = jnp.asarray(np.repeat(np.cumsum((0, *case.q_lens[:-1])), case.q_lens), jnp.int32)
    window = case.window_size[0]
    causal = masks.CausalMask(window_size=window + 1 if window >= 0 else None)
    mask = masks.Mask(causal_mask=causal, k_start=first_key)
    compute = jax.jit(lambda q, k, v: operator(q, k, v, mask=mask, logits_scale=sets[0]["softmax_scale"]))
    prepared = [_one_sequence(case, arguments) for arguments in sets]
    return PeerCall(
        call=Rotation(compute, prepared),
        form="all prompts as one sequence, masked by a first key for each row",
        rows=lambda result: result[0],
    )


def _peer_call(
    case: Case, sets: Sequence[Mapping[str, Any]], parts: Sequence[Part], steps: Sequence[Sequence[_Step]]
) -> PeerCall:
    elements = sum(len(part.keys) * max(part.keys) for part in parts) * case.num_kv_heads * case.head_dim
    require_memory(4 * elements * len(sets), "contiguous keys and values")
    prepared = [
        [
            prepare(arrays)
            for part, own in zip(parts, steps, strict=True)
            for arrays in [contiguous(case, arguments, part)]
            for prepare, _, _ in own
        ]
        for arguments in sets
    ]
    attends = [attend for own in steps for _, attend, _ in own]
    cuts = [cut for own in steps for _, _, cut in own]
    compute = jax.jit(lambda arrays: [attend(*qkv) for attend, qkv in zip(attends, arrays, strict=True)])
    exact = len(attends) == len(parts) and all(not part.folded or max(part.rows) == 1 for part in parts)

    def rows(outputs: Sequence[jax.Array]) -> jax.Array:
        return packed_rows(case, parts, [cut(output) for cut, output in zip(cuts, outputs, strict=True)])

    return PeerCall(
        call=Rotation(compute, [(arrays,) for arrays in prepared]),
        form="; ".join(_forms(case, parts, len(attends))),
        rows=rows if exact else None,
    )


def _forms(case: Case, parts: Sequence[Part], num_calls: int) -> list[str]:
    """Returns what differs from one call over the batch as it is."""
    forms = [f"{num_calls} calls in one jitted function"] if num_calls > 1 else []
    if num_calls > len(parts):
        forms.append("earlier keys without a mask and a chunk's own keys by a causal one, not merged")
    if any(len(part.sequences) > 1 and len(set(part.keys)) > 1 for part in parts):
        forms.append("padded to the longest sequence")
    if any(part.folded and max(part.rows) > 1 for part in parts):
        forms.append("no mask among the last rows of a sequence")
    return forms


def _cudnn_steps(part: Part, window: int, attend: Callable[..., jax.Array]) -> list[_Step]:
    """Returns the calls for a part: cuDNN's causal diagonal starts at the first key, which is not always right."""
    lengths = jnp.asarray(part.keys, jnp.int32) if len(set(part.keys)) > 1 else None
    if part.folded:
        return [(_same, functools.partial(attend, key_value_seq_lengths=lengths), _same)]
    local = {"local_window_size": (window, 0)} if window >= 0 else {}
    causal = functools.partial(
        attend, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths, **local
    )
    if part.offset == 0:
        return [(_same, causal, _same)]
    if window >= 0:  # rows of zeros in front put the diagonal where it belongs
        in_front = ((0, 0), (part.offset, 0), (0, 0), (0, 0))
        return [(lambda qkv: (jnp.pad(qkv[0], in_front), *qkv[1:]), causal, lambda out: out[:, part.offset :])]
    earlier, own = slice(None, part.offset), slice(part.offset, None)
    return [
        (lambda qkv: (qkv[0], qkv[1][:, earlier], qkv[2][:, earlier]), attend, _same),
        (lambda qkv: (qkv[0], qkv[1][:, own], qkv[2][:, own]), causal, _same),
    ]


def _tokamax_steps(part: Part, window: int, attend: Callable[..., jax.Array]) -> list[_Step]:
    """Returns the call for a part: a window to the right moves the causal diagonal."""
    if part.folded:
        lengths = jnp.asarray(part.keys, jnp.int32) if len(set(part.keys)) > 1 else None
        return [(_same, functools.partial(attend, key_value_seq_lengths=lengths), _same)]
    if part.offset == 0 and window < 0:
        return [(_same, functools.partial(attend, is_causal=True), _same)]
    left = window if window >= 0 else part.keys[0]
    return [(_same, functools.partial(attend, local_window_size=(left - part.offset, part.offset)), _same)]


def _same(arrays: Any) -> Any:
    return arrays


def _one_sequence(case: Case, arguments: Mapping[str, Any]) -> _Arrays:
    """Returns (q, k, v) of all prompts behind each other: [1, rows, heads, head_dim]."""
    prompts = [contiguous(case, arguments, part) for part in parts_of(case, together=False)]
    q, k, v = (jnp.concatenate(arrays, axis=1) for arrays in zip(*prompts, strict=True))
    return q, k, v


def _require_several_prompts(case: Case, name: str) -> None:
    if len(case.q_lens) == 1 or case.q_lens != case.kv_lens:
        raise PeerSkippedError(f"for batches of several prompts; {name} does this one")


def _tokamax(module: str, implementation: str) -> Any:
    if "mosaic" in implementation:
        require_gpu("tokamax's Mosaic kernel")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerSkippedError(f"tokamax cannot be imported: {error}") from None
