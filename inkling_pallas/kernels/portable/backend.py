"""Plain JAX, any device: online softmax over tiles of keys gathered through the page table.

The packed rows are cut into q tiles of `block_q` rows of one sequence; `plan` lists them, longest first. A step of the
outer loop takes `tiles_per_step` q tiles at once and walks their keys from the newest tile to the oldest, each q tile
from its own end: so the tiles that carry a bias come first for all of them, and a second loop without bias covers the
rest. Nothing of size num_tokens x keys exists.

Axes in shape comments: t = q tile of the step, h = kv head, g = head of the group, q = row of the tile, k = key of the
tile, d = head_dim.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.core.cache_layouts import read_chunks
from inkling_pallas.core.problem import Operands, Problem, Sequences
from inkling_pallas.core.sheared_layout import biases_of_rows
from inkling_pallas.kernels.portable.q_tiles import Config, Plan, Tiles, plan

__all__ = ["Config", "Plan", "attend", "choose_config", "plan", "unsupported"]

# What a step may hold: scores, and elements of K gathered for it.
_STEP_SCORES = {"cpu": 2**20, "gpu": 2**24}
_STEP_KEYS = 2**26
# By how much weights may exceed 1, in nats: in float16, whose smallest number is 2**-24, as much as it holds, so that a
# key far below the largest keeps its share.
_HEADROOM = {"float16": 14.0 * math.log(2.0)}


class _Softmax(NamedTuple):
    reference: jax.Array  # f32[t, h, g, q], what weights are relative to: the largest score less the headroom
    row_sum: jax.Array  # f32[t, h, g, q]
    acc: jax.Array  # f32[t, h, g, q, d]


def unsupported(problem: Problem, card: Any = None) -> str | None:
    """Returns why this backend refuses the problem, or None."""
    if problem.head_dim % 8 or not 16 <= problem.head_dim <= 256:
        return f"head_dim must be 16 to 256 in steps of 8; got {problem.head_dim}. Pad q and the caches with zeros."
    return None


def choose_config(problem: Problem, card: Any = None) -> Config:
    """Returns tile sizes for a GPU, or for a CPU where `card` is None.

    On a CPU the scores of a step stay in its cache. On a GPU a step should be worth its dozen kernel launches: for one
    prefill of 8,192 tokens, 64 heads, tiles of 1,024 x 1,024 took 18.4 ms where 256 x 512 took 25.7 (NVIDIA H200, jax
    0.11.2, 2026-11-29). A block_q of an eighth of the longest q_len bounds what a short sequence wastes beside it.
    """
    on_cpu = card is None
    window = problem.max_kv_len if problem.window_left is None else problem.window_left + 1
    longest = 128 if on_cpu else max(64, min(problem.max_seqlen_q // 8, 1024, window // 2))
    block_q = min(problem.max_seqlen_q, longest)
    widest = 256 if on_cpu or window <= 2048 else 1024 if block_q > 16 else 4096
    block_kv = min(widest, max(256, 1 << (window - 1).bit_length()))
    tiles = _STEP_SCORES["cpu" if on_cpu else "gpu"] // (problem.num_heads * block_q * block_kv)
    tiles = min(tiles, _STEP_KEYS // (block_kv * problem.num_kv_heads * problem.head_dim), 64)
    useful = problem.batch_size + problem.num_tokens // block_q
    return Config(block_q=block_q, block_kv=block_kv, tiles_per_step=max(1, min(tiles, useful)))


def attend(
    problem: Problem, config: Config, operands: Operands, plan: Plan, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the attention of every packed row, and with problem.return_lse its natural-log LSE.

    Args:
      problem: static facts.
      config: tile sizes.
      operands: the caller's arrays.
      plan: safe lengths and the q tiles, from `plan`.
      interpret: must be False; there is no kernel here to interpret.
    """
    if interpret:
        raise ValueError(
            "interpret must be False for backend 'portable'; got True. "
            "It is plain JAX and runs on a CPU as it is; to interpret a kernel, name it: backend='hopper'."
        )
    out = jnp.zeros((problem.num_tokens, problem.num_heads, problem.head_dim), problem.out_dtype)
    if operands.out is not None:
        out = operands.out.at[:].set(out)  # reads `out`, so that jit can give the result its donated buffer
    lse = jnp.full((problem.num_tokens, problem.num_heads), -jnp.inf, jnp.float32)
    live_tiles = jnp.sum(plan.tiles.rows > 0, dtype=jnp.int32)
    steps = (live_tiles + (config.tiles_per_step - 1)) // config.tiles_per_step

    def step(index: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = index * config.tiles_per_step
        tiles = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, config.tiles_per_step), plan.tiles)
        return _attend_tiles(problem, config, operands, plan.sequences, tiles, results)

    out, lse = lax.fori_loop(0, steps, step, _varying_like((out, lse), (operands, plan)))
    return out, lse if problem.return_lse else None


def _attend_tiles(
    problem: Problem,
    config: Config,
    operands: Operands,
    sequences: Sequences,
    tiles: Tiles,
    results: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Computes some q tiles and writes their rows into (out, lse)."""
    row = lax.iota(jnp.int32, config.block_q)[None]  # [1, q]
    packed = sequences.q_start[tiles.sequence][:, None] + tiles.first_row[:, None] + row  # [t, q]
    readable = jnp.clip(packed, 0, problem.num_tokens - 1)
    q = _by_kv_head(problem, operands.q[readable])
    position = sequences.first_pos[tiles.sequence] + tiles.first_row  # [t], of row 0
    biases = biases_of_rows(operands.rel_logits, readable, position[:, None] + row)
    rel_logits = _pad_distances(config, _by_kv_head(problem, biases))
    newest = (tiles.key_end + (config.block_kv - 1)) // config.block_kv
    biased_steps = jnp.max(newest - tiles.bias_begin // config.block_kv)
    all_steps = jnp.max(newest - tiles.key_begin // config.block_kv)

    def step(index: jax.Array, state: _Softmax, *, biased: bool) -> _Softmax:
        first_key = (newest - 1 - index) * config.block_kv  # [t]; below key_begin once a q tile is done
        k, v, live = _read_tile(problem, config, operands, tiles, first_key)
        with jax.named_scope("scores"):
            scores = _dot(problem, "thgqd,tkhd->thgqk", q, k) * problem.softmax_scale
        if biased:
            with jax.named_scope("bias"):
                scores = scores + _bias_tile(config, rel_logits, position - first_key).astype(jnp.float32)
        visible = _visible(problem, position, row, first_key, live)
        return _online_softmax(problem, state, jnp.where(visible[:, None, None], scores, -jnp.inf), v)

    state = _varying_like(_initial(q), (operands, tiles))
    state = lax.fori_loop(0, biased_steps, functools.partial(step, biased=True), state)
    state = lax.fori_loop(biased_steps, all_steps, functools.partial(step, biased=False), state)
    target = jnp.where(
        row < tiles.rows[:, None], packed, problem.num_tokens
    )  # rows past the tile are dropped by the scatter
    return _write_rows(problem, state, target, results)


def _varying_like(carry: Any, inputs: Any) -> Any:
    """Returns a loop's first values unchanged, but varying over every mesh axis that an input varies over.

    shard_map wants a loop's carry to have one type from the first step on. Adding a condition that is never true gives
    it that type by plain dataflow, and XLA folds it away.
    """
    never = functools.reduce(jnp.logical_or, (leaf.ravel()[0] != leaf.ravel()[0] for leaf in jax.tree.leaves(inputs)))
    never = jnp.logical_and(never, False)
    return jax.tree.map(lambda leaf: jnp.where(never, jnp.zeros_like(leaf), leaf), carry)


def _by_kv_head(problem: Problem, rows: jax.Array) -> jax.Array:
    """[t, q, num_heads, x] -> [t, h, g, q, x]."""
    tiles, block_q, _, width = rows.shape
    grouped = rows.reshape(tiles, block_q, problem.num_kv_heads, problem.group, width)
    return grouped.transpose(0, 2, 3, 1, 4)


def _pad_distances(config: Config, rel_logits: jax.Array) -> jax.Array:
    """Adds zeros on both sides of the extent, so that any window of distances that a tile needs is one slice."""
    margin = config.block_q + config.block_kv
    return jnp.pad(rel_logits, ((0, 0),) * 4 + ((margin, margin),))


def _bias_tile(config: Config, padded: jax.Array, offset: jax.Array) -> jax.Array:
    """Returns bias[t, h, g, q, k] = rel_logits[..., q, dist], dist = offset + q - k, and 0 outside the extent.

    With keys reversed, row q of the tile is its window of distances shifted by q. Rows of width w laid end to end and
    read again at width w + 1 are shifted so: the tile is a slice, a pad and two reshapes, where a gather would take one
    load per score.
    """
    block_q, block_kv = config.block_q, config.block_kv
    width = block_q + block_kv
    extent = padded.shape[-1] - 2 * width
    start = jnp.clip(offset - (block_kv - 1), -width, extent) + width
    window = jax.vmap(lambda x, s: lax.dynamic_slice_in_dim(x, s, width, axis=-1))(padded, start)
    lead = window.shape[:-2]
    end_to_end = window.reshape(*lead, block_q * width)
    end_to_end = jnp.pad(end_to_end, ((0, 0),) * len(lead) + ((0, block_q),))
    return end_to_end.reshape(*lead, block_q, width + 1)[..., block_kv - 1 :: -1]


def _read_tile(
    problem: Problem, config: Config, operands: Operands, tiles: Tiles, first_key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns K and V [t, k, h, d] of one tile per q tile, and which keys are live, bool[t, k].

    Values of dead keys are zero.

    Only pages in the pool are read: the keys of a page id outside it count as absent.
    """
    key = first_key[:, None] + lax.iota(jnp.int32, config.block_kv)[None]
    live = (key >= tiles.key_begin[:, None]) & (key < tiles.key_end[:, None])
    key = jnp.clip(key, 0, problem.max_kv_len - 1)
    page = operands.block_table[tiles.sequence[:, None], key // problem.block_size]
    live &= (page >= 0) & (page < problem.num_blocks)
    chunk = math.gcd(problem.block_size, config.block_kv)  # keys that are neighbours in memory whatever the table says
    first = (slice(None), slice(None, None, chunk))
    page = jnp.clip(page[first], 0, problem.num_blocks - 1)
    place = key[first] % problem.block_size // chunk

    with jax.named_scope("read_pages"):
        chunks = read_chunks(problem.layout, operands.cache_arrays, chunk, page, place)
        k, v = (x.reshape(*key.shape, problem.num_kv_heads, problem.head_dim) for x in chunks)
        # A dead key has weight 0, but 0 * NaN is NaN: its value must go, too.
        return k, jnp.where(live[..., None, None], v, jnp.zeros_like(v)), live


def _visible(problem: Problem, position: jax.Array, row: jax.Array, first_key: jax.Array, live: jax.Array) -> jax.Array:
    """Returns which keys each row sees, bool[t, q, k]."""
    key = first_key[:, None] + lax.iota(jnp.int32, live.shape[1])[None]
    dist = (position[:, None] + row)[:, :, None] - key[:, None, :]
    visible = jnp.broadcast_to(live[:, None, :], dist.shape)
    if problem.window_left is not None:
        visible &= dist <= problem.window_left
    if problem.window_right is not None:
        visible &= dist >= -problem.window_right
    return visible


def _initial(q: jax.Array) -> _Softmax:
    rows = q.shape[:-1]
    return _Softmax(
        jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(q.shape, jnp.float32)
    )


def _online_softmax(problem: Problem, state: _Softmax, scores: jax.Array, v: jax.Array) -> _Softmax:
    """Folds one tile of masked scores f32[t, h, g, q, k] into the running softmax."""
    with jax.named_scope("softmax"):
        reference = jnp.maximum(state.reference, scores.max(axis=-1) - _HEADROOM.get(problem.dtype, 0.0))
        finite = jnp.where(
            jnp.isneginf(reference), 0.0, reference
        )  # a row without keys yet: exp(-inf - 0), never exp(-inf + inf)
        rescale = jnp.exp(state.reference - finite)
        weights = jnp.exp(scores - finite[..., None])
        row_sum = state.row_sum * rescale + weights.sum(axis=-1)
    with jax.named_scope("values"):
        update = _dot(problem, "thgqk,tkhd->thgqd", weights.astype(v.dtype), v)
    return _Softmax(reference, row_sum, state.acc * rescale[..., None] + update)


def _dot(problem: Problem, axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies with float32 accumulation; float32 operands are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if problem.dtype == "float32" else None
    return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=jnp.float32)


def _write_rows(
    problem: Problem, state: _Softmax, target: jax.Array, results: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Scatters finished rows [t, q] to packed rows `target`; a target of num_tokens is dropped."""
    empty = state.row_sum == 0
    row_sum = jnp.where(empty, 1.0, state.row_sum)
    out = (state.acc / row_sum[..., None]).transpose(0, 3, 1, 2, 4)
    lse = jnp.where(empty, -jnp.inf, state.reference + jnp.log(row_sum)).transpose(0, 3, 1, 2)
    heads = (*target.shape, problem.num_heads)
    return (
        results[0].at[target].set(out.reshape(*heads, problem.head_dim).astype(results[0].dtype), mode="drop"),
        results[1].at[target].set(lse.reshape(heads), mode="drop"),
    )
