"""What the pictures show, as NumPy: weights of a row, which pages belong to whom, which keys of a row have a bias."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from inkling_pallas.core.errors import refuse
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.testing.reference import evaluate

# What a row does with a key, in the order of `BANDS`.
HIDDEN, FAR, BIASED = 0, 1, 2
BANDS = ("not seen: after the row, or outside the window", "seen, bias 0: dist >= rel_extent", "seen, with bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """One sequence of a call: its rows, keys and pages. Positions count from the first key of its table."""

    index: int
    q_start: int
    q_len: int
    kv_len: int
    first_pos: int
    pages: np.ndarray
    block_size: int


class RowWeights(NamedTuple):
    """Attention weights of one row and head over the keys that the row may see."""

    dist: np.ndarray  # int64[keys]
    with_bias: np.ndarray  # float64[keys], sum 1
    without_bias: np.ndarray  # float64[keys], sum 1


def sequence_of(call: Mapping[str, Any], index: int) -> Sequence:
    """Returns the facts of one sequence.

    Args:
      call: the arguments of `inkling_rel_attention`.
      index: its place in the batch.

    Raises:
      ValueError: if there is no such sequence.
    """
    offsets, cached = np.asarray(call["cu_seqlens_q"]), np.asarray(call["cache_seqlens"])
    if not 0 <= index < len(cached):
        raise refuse("sequence", f"lie in [0, {len(cached)})", index, "It is a row of block_table.")
    start, end = map(int, offsets[index : index + 2])
    total, offset = int(cached[index]), 0
    if call.get("kv_offset") is not None:
        offset = int(np.asarray(call["kv_offset"])[index])
    if call.get("total_seqlens") is not None:
        total = int(np.asarray(call["total_seqlens"])[index]) - offset
    block_size = pool_of(call)[1]
    kv_len = int(cached[index])
    pages = np.asarray(call["block_table"])[index, : -(-kv_len // block_size)]
    first_pos = total - (end - start)
    return Sequence(
        index=index,
        q_start=start,
        q_len=end - start,
        kv_len=kv_len,
        first_pos=first_pos,
        pages=pages,
        block_size=block_size,
    )


def pool_of(call: Mapping[str, Any]) -> tuple[int, int]:
    """Returns (num_blocks, block_size) of the cache of a call."""
    cache = call["key_cache"]
    if isinstance(cache, PagedKVCache):
        return cache.num_blocks, cache.block_size
    return cache.shape[0], cache.shape[1]


def sequence_with_row(call: Mapping[str, Any], token: int) -> Sequence:
    """Returns the sequence that a packed row belongs to.

    Args:
      call: the arguments of `inkling_rel_attention`.
      token: the packed row.

    Raises:
      ValueError: if it is a row of no sequence.
    """
    offsets = np.asarray(call["cu_seqlens_q"])
    if not offsets[0] <= token < offsets[-1]:
        raise refuse(
            "token", f"lie in [0, {offsets[-1]}), the rows of the batch", token, "The rows past it are padding."
        )
    return sequence_of(call, int(np.searchsorted(offsets, token, side="right")) - 1)


def default_token(call: Mapping[str, Any]) -> int:
    """Returns the last row of the sequence with the most rows: it sees the most, and its bands have a shape."""
    offsets = np.asarray(call["cu_seqlens_q"])
    return int(offsets[1 + int(np.argmax(np.diff(offsets)))]) - 1


def row_weights(call: Mapping[str, Any], token: int, head: int) -> RowWeights:
    """Returns the weights of one row and head, in float64 from the formula, with its bias and with none.

    Args:
      call: the arguments of `inkling_rel_attention`.
      token: the packed row.
      head: the query head.
    """
    sequence = sequence_with_row(call, token)
    logits: list[np.ndarray] = []

    def take_logits(
        q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, bias: np.ndarray, visible: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        group = q.shape[1] // keys.shape[1]
        plain = scale * (keys[:, head // group].astype(np.float64) @ q[0, head].astype(np.float64))
        hidden = np.where(visible[0], 0.0, -np.inf)
        logits.extend((plain + bias[0, head].astype(np.float64) + hidden, plain + hidden))
        return np.zeros(q.shape), np.zeros(q.shape[:2])

    evaluate(take_logits, **{**call, "tokens": [token]})
    position = sequence.first_pos + token - sequence.q_start
    if not logits:
        return RowWeights(*(np.zeros(0) for _ in range(3)))
    # The oracle looks at no key before the window, and at none after the last that the row sees.
    reach = 0 if call["causal"] or call["window_size"][1] == 0 else call["window_size"][1]
    end = sequence.kv_len if reach == -1 else min(sequence.kv_len, position + reach + 1)
    dist = position - np.arange(end - len(logits[0]), end)
    return RowWeights(dist, *map(_softmax, logits))


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def bands(call: Mapping[str, Any], sequence: Sequence, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns HIDDEN, FAR or BIASED for each pair of a row and a key of a sequence, int64[len(rows), len(keys)].

    Args:
      call: the arguments of `inkling_rel_attention`.
      sequence: from `sequence_of`.
      rows: rows within the sequence.
      keys: keys within its table.
    """
    dist = sequence.first_pos + rows[:, None] - keys
    left, right = call["window_size"]
    seen = np.broadcast_to(keys < sequence.kv_len, dist.shape)
    if left != -1:
        seen = seen & (dist <= left)
    if call["causal"] or right != -1:
        seen = seen & (-dist <= (0 if call["causal"] else right))
    return np.where(seen, np.where((dist >= 0) & (dist < call["rel_extent"]), BIASED, FAR), HIDDEN)


def page_owners(call: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (sequence, block) of each page of the pool, -1 where no sequence has it.

    Args:
      call: the arguments of `inkling_rel_attention`.
    """
    num_blocks = pool_of(call)[0]
    owner, block = np.full(num_blocks, -1), np.full(num_blocks, -1)
    for b in range(len(np.asarray(call["cache_seqlens"]))):
        pages = sequence_of(call, b).pages
        live = np.flatnonzero((pages >= 0) & (pages < num_blocks))
        owner[pages[live]], block[pages[live]] = b, live
    return owner, block
