"""Lengths made safe for addressing, whatever the caller's arrays hold.

`safe_end` and `safe_sequence` are arithmetic on single int32 elements: kernels run them as they are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.core.problem import LENGTH_LIMIT, Lengths, Problem, Sequences
from inkling_pallas.core.sheared_layout import row_shifts


class Rows(NamedTuple):
    """First row of a sequence and of the next one, as the caller gave them. int32."""

    start: jax.Array
    end: jax.Array


def safe_end(problem: Problem, rows: Rows) -> jax.Array:
    """Returns where the rows of a sequence end, 0 if it has none, before those that others claim are taken off."""
    return _end(problem.num_tokens, rows)


def _end(num_tokens: int, rows: Rows) -> jax.Array:
    start, end = rows
    return jnp.where((start >= 0) & (start <= end) & (end <= num_tokens), end, jnp.zeros_like(end))


def safe_sequence(problem: Problem, rows: Rows, claimed: jax.Array, lengths: Lengths) -> Sequences:
    """Returns the safe facts of a sequence, element by element.

    Args:
      problem: static facts.
      rows: its row offsets.
      claimed: the largest safe end of the sequences before it.
      lengths: its other lengths; `cu_seqlens_q` is not read.
    """
    placed = _place(problem.num_tokens, rows, claimed, lengths)
    return placed._replace(
        q_len=jnp.minimum(placed.q_len, problem.max_seqlen_q), kv_len=jnp.minimum(placed.kv_len, problem.max_kv_len)
    )


def _place(num_tokens: int, rows: Rows, claimed: jax.Array, lengths: Lengths) -> Sequences:
    start = jnp.maximum(rows.start, claimed)
    q_len = jnp.maximum(_end(num_tokens, rows) - start, 0)
    # A sequence without rows starts at 0: the rows before its offsets are nobody's, and must not count as its own.
    start = jnp.where(q_len > 0, start, jnp.zeros_like(start))
    cached = jnp.clip(lengths.cache_seqlens, 0, LENGTH_LIMIT)
    offset = jnp.zeros_like(cached) if lengths.kv_offset is None else jnp.clip(lengths.kv_offset, 0, LENGTH_LIMIT)
    total = offset + cached if lengths.total_seqlens is None else jnp.clip(lengths.total_seqlens, 0, LENGTH_LIMIT)
    return Sequences(q_start=start, q_len=q_len, kv_len=cached, first_pos=total - q_len - offset)


def safe_sequences(problem: Problem, lengths: Lengths) -> Sequences:
    """Returns per-sequence facts that stay in bounds for any contents of the length arrays.

    A sequence whose row offsets decrease or leave [0, num_tokens] has no rows; where two sequences claim a row, the
    earlier one has it. Rows past max_seqlen_q are dropped. Positions count from the end of a sequence, so clipping its
    first rows moves no other row.
    """
    rows = Rows(lengths.cu_seqlens_q[:-1], lengths.cu_seqlens_q[1:])
    return safe_sequence(problem, rows, _claimed(problem.num_tokens, rows), lengths)


def place_rows(num_tokens: int, lengths: Lengths) -> Sequences:
    """Returns where the rows of each sequence lie and stand, as `safe_sequences` without the limits of a problem."""
    rows = Rows(lengths.cu_seqlens_q[:-1], lengths.cu_seqlens_q[1:])
    return _place(num_tokens, rows, _claimed(num_tokens, rows), lengths)


def shifts_of_rows(num_tokens: int, lengths: Lengths, rel_extent: int) -> jax.Array:
    """Returns the shift of each packed row in the sheared layout, int32[num_tokens]; -1 in rows of no sequence."""
    rows = place_rows(num_tokens, lengths)
    return row_shifts(rows.q_start, rows.q_len, rows.first_pos, num_tokens=num_tokens, rel_extent=rel_extent)


def _claimed(num_tokens: int, rows: Rows) -> jax.Array:
    """Returns the largest end of the sequences before each one."""
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), lax.cummax(_end(num_tokens, rows))[:-1]])
