"""The formula over whole tables of keys in float32 and plain jnp, jitted on the device of what it judges.

It shares no code with any backend. It gives a meaning to any contents: what the operator's documents say is repaired is
repaired here, by comparing every row with every sequence. `reference_rel_attention` is what it is held to.

Axes in shape comments: b = sequence, i = row of a sequence, t = packed row, j = key of a table, e = entry of it,
h = kv head, g = head of its group, d = head_dim.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inkling_pallas.testing.limits import ERROR_FLOORS, LSE_LIMIT
from inkling_pallas.testing.soak_shapes import Shape

# Lengths and positions count up to here.
_LONGEST = 2**29
Call = dict[str, Any]


class Rows(NamedTuple):
    """Who has which packed row, and where it stands."""

    owner: jax.Array  # int32[t], the sequence; -1 in rows of no sequence
    place: jax.Array  # int32[t], which row of that sequence
    token: jax.Array  # int32[b, i], the packed row
    mine: jax.Array  # bool[b, i], false where the sequence has no such row
    position: jax.Array  # int32[b, i], in keys of the table


class Dense(NamedTuple):
    """The right result, and that of the same formula at the precision of the inputs."""

    out: jax.Array  # f32[t, num_heads, d]
    lse: jax.Array  # f32[t, num_heads]
    rounded: jax.Array  # f32[t, num_heads, d]


def place_rows(shape: Shape, call: Call) -> Rows:
    """Returns who has which row: of sound offsets, and behind the rows of all sequences before."""
    begin, end = call["cu_seqlens_q"][:-1], call["cu_seqlens_q"][1:]
    sound = (begin >= 0) & (begin <= end) & (end <= shape.num_tokens)
    sequence = jnp.arange(shape.batch_size, dtype=jnp.int32)
    earlier = (sequence[None, :] < sequence[:, None]) & sound[None, :]
    first = jnp.maximum(begin, jnp.where(earlier, end[None, :], 0).max(axis=1))  # [b]
    token = jnp.arange(shape.num_tokens, dtype=jnp.int32)[:, None]
    inside = sound[None] & (token >= first[None]) & (token < end[None])
    inside &= token - first[None] < shape.max_seqlen_q
    owner = jnp.where(inside.any(axis=1), inside.argmax(axis=1).astype(jnp.int32), -1)
    place = jnp.where(owner >= 0, token[:, 0] - first[owner], 0)
    row = jnp.arange(shape.max_seqlen_q, dtype=jnp.int32)[None, :]
    mine = sound[:, None] & (row < (end - first)[:, None])
    cached = jnp.clip(call["cache_seqlens"], 0, _LONGEST)
    offset = jnp.clip(call.get("kv_offset", jnp.zeros_like(cached)), 0, _LONGEST)
    total = jnp.clip(call.get("total_seqlens", offset + cached), 0, _LONGEST)
    position = (total - offset - (end - first))[:, None] + row
    return Rows(owner, place, jnp.where(mine, first[:, None] + row, 0), mine, jnp.where(mine, position, 0))


def seen_keys(shape: Shape, call: Call, rows: Rows) -> jax.Array:
    """Returns which keys each row sees were all pages there, bool[b, i, j]."""
    key = jnp.arange(shape.capacity, dtype=jnp.int32)[None, None, :]
    dist = rows.position[:, :, None] - key
    left, right = shape.window_size
    seen = rows.mine[:, :, None] & (key < call["cache_seqlens"][:, None, None]) & (dist >= 0)
    if left != -1:
        seen &= dist <= left
    return seen if right == -1 else seen & (-dist <= right)


def slots_of(shape: Shape, block_table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where each key lies in the pool, int32[b, j], and whether its page is there at all."""
    page = jnp.repeat(block_table, shape.block_size, axis=1)
    present = (page >= 0) & (page < shape.num_blocks)
    place = jnp.arange(shape.capacity, dtype=jnp.int32) % shape.block_size
    return jnp.where(present, page, 0) * shape.block_size + place[None, :], present


def attend(shape: Shape, call: Call) -> Dense:
    """Returns the attention of every packed row: 0 and -inf in rows that see no key."""
    rows = place_rows(shape, call)
    slot, present = slots_of(shape, call["block_table"])
    seen = seen_keys(shape, call, rows) & present[:, None, :]
    used = seen.any(axis=1)[:, :, None, None]

    def read(cache: jax.Array) -> jax.Array:
        keys = cache.reshape(-1, shape.num_kv_heads, shape.head_dim)[slot].astype(jnp.float32)
        return jnp.where(used, keys, 0.0)

    keys, values = read(call["key_cache"]), read(call["value_cache"])
    mine = rows.mine[:, :, None, None]
    q = jnp.where(mine, call["q"][rows.token].astype(jnp.float32), 0.0)
    grouped = q.reshape(*q.shape[:2], shape.num_kv_heads, -1, shape.head_dim)
    scores = _multiply("bihgd,bjhd->bhgij", grouped, keys) * shape.softmax_scale
    biases = jnp.where(mine, call["rel_logits"][rows.token].astype(jnp.float32), 0.0)
    scores = jnp.where(seen[:, None, None], scores + _bias(shape, biases, rows).reshape(scores.shape), -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    rounded = _multiply("bhgij,bjhd->bhgid", weights.astype(shape.dtype).astype(jnp.float32), values)
    out = _multiply("bhgij,bjhd->bhgid", weights, values)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1.0, total)))
    back = [_by_token(shape, rows, x, empty) for x, empty in ((out, 0.0), (lse, -jnp.inf), (rounded, 0.0))]
    return Dense(back[0], back[1][..., 0], back[2].astype(shape.dtype).astype(jnp.float32))


def _multiply(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(axes, a, b, precision=jax.lax.Precision.HIGHEST)


def _bias(shape: Shape, biases: jax.Array, rows: Rows) -> jax.Array:
    """Returns the bias [b, num_heads, i, j] of rows [b, i, num_heads, rel_extent]: 0 outside 0 <= dist < rel_extent."""
    dist = rows.position[:, :, None] - jnp.arange(shape.capacity, dtype=jnp.int32)[None, None, :]
    inside = (dist >= 0) & (dist < shape.rel_extent)
    picked = jnp.take_along_axis(biases, jnp.where(inside, dist, 0)[:, :, None, :], axis=3)
    return jnp.where(inside[:, :, None, :], picked, 0.0).transpose(0, 2, 1, 3)


def _by_token(shape: Shape, rows: Rows, result: jax.Array, empty: float) -> jax.Array:
    """[b, h, g, i, x] -> [t, num_heads, x], `empty` in rows of no sequence."""
    by_row = result.transpose(0, 3, 1, 2, 4)[jnp.maximum(rows.owner, 0), rows.place]
    by_row = by_row.reshape(shape.num_tokens, shape.num_heads, -1)
    return jnp.where((rows.owner >= 0)[:, None, None], by_row, empty)


class Marks(NamedTuple):
    """How far a batch is from the dense form; float32 scalars."""

    wrong: jax.Array  # rows of one head whose out or LSE is over its limit
    error: jax.Array  # of the worst row
    limit: jax.Array
    worst: jax.Array  # that row: token * num_heads + head
    lse_error: jax.Array  # over its limit
    worst_lse: jax.Array


def compare(shape: Shape, call: Call, out: jax.Array, lse: jax.Array | None) -> Marks:
    """Returns the marks of a result, by the measures and limits of `inkling_pallas.testing.limits`."""
    right = attend(shape, call)
    error = row_errors(out.astype(jnp.float32), right.out)
    limit = jnp.maximum(2.0 * row_errors(right.rounded, right.out).max(), ERROR_FLOORS[shape.dtype])
    lse_error = jnp.zeros_like(error) if lse is None else lse_errors(lse, right.lse)
    # A limit that is no number lets nothing pass: the draw is broken then.
    wrong = ~(error <= limit) | ~(lse_error <= 1.0) | ~jnp.isfinite(limit)
    numbers = (wrong.sum(), error.max(), limit, error.argmax(), lse_error.max(), lse_error.argmax())
    return Marks(*(number.astype(jnp.float32) for number in numbers))


def row_errors(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns |actual - expected| / |expected| per row; infinity for NaN, and for anything where 0 is right."""
    difference = jnp.sqrt(jnp.square(actual - expected).sum(axis=-1))
    size = jnp.sqrt(jnp.square(expected).sum(axis=-1))
    zero = (actual == 0).all(axis=-1)
    error = jnp.where(size > 0, difference / jnp.where(size > 0, size, 1.0), jnp.where(zero, 0.0, jnp.inf))
    return jnp.where(jnp.isnan(error), jnp.inf, error)


def lse_errors(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the absolute error over its limit; infinity for NaN, and where one side alone is -inf."""
    none = jnp.isneginf(expected)
    error = jnp.abs(actual - jnp.where(none, 0.0, expected)) / LSE_LIMIT
    error = jnp.where(none, jnp.where(jnp.isneginf(actual), 0.0, jnp.inf), error)
    return jnp.where(jnp.isnan(error), jnp.inf, error)
