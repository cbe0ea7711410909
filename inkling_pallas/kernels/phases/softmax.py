"""Online softmax on register arrays: pure functions. `_log2` marks logits times log2(e).

A score tile is [keys, columns]: a column is a query row. Scores enter in log2 units, so that every exponential is an
exp2.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
# A score for keys that are on no page, whose values are zeros: far under any other, yet finite. As a power of two times
# log2(e) it is exact, so that a fused multiply and subtract of two such leaves nothing.
ABSENT = -(2.0**100)
# By how much weights may exceed 1, log2. In float16, whose smallest number is 2**-24, that is as much as fits: a key
# far below the largest keeps its share.
_HEADROOM_LOG2 = {"bfloat16": 0.0, "float16": 14.0}
# The same where the reference follows the largest score lazily, and how far that may be ahead, log2.
_LAZY_LOG2 = {"bfloat16": (0.0, 8.0), "float16": (12.0, 3.0)}


class State(NamedTuple):
    """What is known of some query rows after some keys.

    `weight` is kept per (key modulo 64, column) and summed only at the end, which saves a reduction over warps in
    each tile.
    """

    acc: jax.Array  # float32[head_dim, columns], sum of weight * value
    reference_log2: jax.Array  # float32[columns], what weights are relative to: the largest score less the headroom
    weight: jax.Array  # float32[64, columns], sum of exp2(score - reference_log2)


def finite(x: jax.Array) -> jax.Array:
    """Returns x with -inf replaced by 0, so that exp2(-inf - x) is 0 and never NaN."""
    return jnp.where(x == -jnp.inf, jnp.zeros_like(x), x)


def along_keys(x: jax.Array, keys: int) -> jax.Array:
    """Returns [columns] repeated for each key (or each head_dim element) of a tile."""
    return lax.broadcast_in_dim(x, (keys, *x.shape), (1,))


def scores_log2(products: jax.Array, bias: jax.Array | None, *, scale: float) -> jax.Array:
    """Returns logits in log2 units; the scale does not multiply the bias."""
    scores = products * (scale * LOG2_E)
    return scores if bias is None else scores + bias.astype(jnp.float32) * LOG2_E


def mask_tile(scores: jax.Array, key: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
    """Returns scores with -inf where `key`, of the scores' shape, is outside [begin, end) of its column."""
    begin, end = (along_keys(x, scores.shape[0]) for x in (begin, end))
    return jnp.where((key >= begin) & (key < end), scores, jnp.full_like(scores, -jnp.inf))


def mask_chunks(scores: jax.Array, chunk: jax.Array, absent: jax.Array) -> jax.Array:
    """Returns scores with -inf at the keys of some chunks of a tile.

    Args:
      scores: float32.
      chunk: int32 of the same shape, which chunk a key is in.
      absent: int32 scalar, bit i for chunk i.
    """
    bit = lax.shift_right_logical(jnp.full_like(chunk, absent), chunk) & 1
    return jnp.where(bit == 0, scores, jnp.full_like(scores, -jnp.inf))


def absorb(state: State, scores: jax.Array, dtype: str) -> tuple[State, jax.Array]:
    """Returns the state rescaled to a tile's scores, without its values, and the tile's weights, to be of `dtype`."""
    top = scores.max(axis=0)
    if _HEADROOM_LOG2[dtype]:
        top = top - _HEADROOM_LOG2[dtype]
    top = jnp.maximum(state.reference_log2, top)
    reference = finite(top)
    decay = jnp.exp2(state.reference_log2 - reference)
    weights = jnp.exp2(scores - along_keys(reference, scores.shape[0]))
    kept = state.weight.shape[0]
    parts = [weights[i : i + kept] for i in range(0, scores.shape[0], kept)]
    weight = functools.reduce(jnp.add, parts, state.weight * along_keys(decay, kept))
    return State(state.acc * along_keys(decay, state.acc.shape[0]), top, weight), weights


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Returns the normalised rows [head_dim, columns] and their log-sum-exp in log2 units.

    0 and -inf for a row without keys.
    """
    total = state.weight.sum(axis=0)
    live = total > 0.0
    divisor = jnp.where(live, total, jnp.ones_like(total))
    lse_log2 = jnp.where(live, state.reference_log2 + jnp.log2(divisor), jnp.full_like(total, -jnp.inf))
    return state.acc / along_keys(divisor, state.acc.shape[0]), lse_log2


class RowState(NamedTuple):
    """As `State`, for score tiles whose rows are query rows.

    Weights are relative to a score that the largest one exceeds by at most 8 (log2), 15 in float16, so that their dtype
    holds them. It follows the largest only when that has grown by more, so the sums of most tiles need no rescaling.
    """

    acc: jax.Array  # float32[rows, head_dim], sum of weight * value
    reference_log2: jax.Array  # float32[rows], what weights are relative to
    weight: jax.Array  # float32[rows, 8], sum of weights by key modulo 8: a thread has its own, added up at the end


def along_rows(x: jax.Array, width: int) -> jax.Array:
    """Returns [rows] repeated for each key (or each head_dim element) of a row."""
    return lax.broadcast_in_dim(x, (*x.shape, width), (0,))


def raise_reference(
    reference_log2: jax.Array, largest: jax.Array, dtype: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what weights are relative to after a tile, the same finite, and what earlier weights are multiplied by.

    The last is exactly 1 in rows whose largest score has not grown much.

    Args:
      reference_log2: float32[rows], before the tile; -inf before any key.
      largest: float32[rows], of the tile's scores in natural units; -inf without any.
      dtype: what the weights will be of.
    """
    headroom, slack = _LAZY_LOG2[dtype]
    top = largest * LOG2_E
    if headroom:
        top = top - headroom
    after = jnp.where(top > reference_log2 + slack, top, reference_log2)
    reference = finite(after)
    decay = jnp.where(after == reference_log2, jnp.ones_like(top), jnp.exp2(reference_log2 - reference))
    return after, reference, decay


def row_weights(scores: jax.Array, reference_log2: jax.Array) -> jax.Array:
    """Returns the weights of a tile's keys, [rows, keys], relative to a score of each row: finite, or +inf for 0."""
    return jnp.exp2(scores * LOG2_E - along_rows(reference_log2, scores.shape[1]))


def add_weights(sums: jax.Array, decay: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the sums of weights, [rows, 8], with those of a tile, earlier ones multiplied by `decay`."""
    width = sums.shape[1]
    blocks = [weights[:, i : i + width] for i in range(0, weights.shape[1], width)]
    return functools.reduce(jnp.add, blocks, sums * along_rows(decay, width))


def weigh_rows_lazily(
    reference_log2: jax.Array, scores: jax.Array, dtype: str, masked: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what weights are relative to after a tile, what earlier ones are multiplied by, and the tile's own."""
    after, reference, decay = raise_reference(reference_log2, scores.max(axis=1), dtype)
    return after, decay, row_weights(scores, reference)


def finish_rows(state: RowState, lowest: float | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns the normalised rows [rows, head_dim] and their log-sum-exp in log2 units.

    0 and -inf for a row without keys.
    """
    scale, lse_log2 = scale_and_lse(state.weight.sum(axis=1), state.reference_log2, lowest)
    return state.acc * along_rows(scale, state.acc.shape[1]), lse_log2


def scale_and_lse(
    weight: jax.Array, reference_log2: jax.Array, lowest: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns what the sums of some rows are to be multiplied by, and their log-sum-exp in log2 units.

    A row has seen no key where its weights are 0, or what they are relative to is at most `lowest`.
    """
    live = weight > 0.0 if lowest is None else (weight > 0.0) & (reference_log2 > lowest)
    divisor = jnp.where(live, weight, jnp.ones_like(weight))
    lse_log2 = jnp.where(live, reference_log2 + jnp.log2(divisor), jnp.full_like(divisor, -jnp.inf))
    scale = 1.0 / divisor
    return scale if lowest is None else jnp.where(live, scale, jnp.zeros_like(scale)), lse_log2


class Merged(NamedTuple):
    """Partial results so far, all arrays of one shape.

    Sum of 2**(lse - top) * value, largest lse, sum of 2**(lse - top).
    """

    acc: jax.Array
    top_log2: jax.Array
    weight: jax.Array


def merge(state: Merged, values: list[jax.Array], lses_log2: list[jax.Array]) -> Merged:
    """Returns the state with further partial results; an lse of -inf has weight 0."""
    top = functools.reduce(jnp.maximum, lses_log2, state.top_log2)
    reference = finite(top)
    decay = jnp.exp2(state.top_log2 - reference)
    weights = [jnp.exp2(lse - reference) for lse in lses_log2]
    terms = [value * weight for value, weight in zip(values, weights, strict=True)]
    acc = functools.reduce(jnp.add, terms, state.acc * decay)
    return Merged(acc, top, functools.reduce(jnp.add, weights, state.weight * decay))


def finish_merge(state: Merged) -> tuple[jax.Array, jax.Array]:
    """Returns the merged values and their log-sum-exp in log2 units."""
    live = state.weight > 0.0
    divisor = jnp.where(live, state.weight, jnp.ones_like(state.weight))
    lse_log2 = jnp.where(live, state.top_log2 + jnp.log2(divisor), jnp.full_like(divisor, -jnp.inf))
    return state.acc / divisor, lse_log2


def join(states: list[Merged]) -> Merged:
    """Returns the merge of several states."""
    top = functools.reduce(jnp.maximum, [state.top_log2 for state in states])
    scales = [jnp.exp2(state.top_log2 - finite(top)) for state in states]
    acc = functools.reduce(jnp.add, [state.acc * scale for state, scale in zip(states, scales, strict=True)])
    weight = functools.reduce(jnp.add, [state.weight * scale for state, scale in zip(states, scales, strict=True)])
    return Merged(acc, top, weight)
