"""Checks of array contents on the host: what `safe_sequences` would quietly repair is named here."""

from typing import Any

import jax
import jax.core
import numpy as np

from inkling_pallas.core.errors import refuse
from inkling_pallas.core.problem import LENGTH_LIMIT, Lengths, Problem
from inkling_pallas.core.safe_lengths import shifts_of_rows
from inkling_pallas.core.sheared_layout import ShearedLogits


def check_batch_contents(problem: Problem, block_table: Any, lengths: Lengths, max_seqlen_q: int) -> None:
    """Raises ValueError with array, index, value and rule for the first wrong entry of a batch.

    Args:
      problem: static facts of the call.
      block_table: int32[batch, max_blocks], concrete.
      lengths: the batch's length arrays, concrete.
      max_seqlen_q: the value the caller gave, before rounding up.
    """
    table = _concrete("block_table", block_table)
    cached = _concrete("cache_seqlens", lengths.cache_seqlens)
    q_len = _check_rows(problem, _concrete("cu_seqlens_q", lengths.cu_seqlens_q), max_seqlen_q)
    capacity = problem.max_kv_len
    _check_entries(
        "cache_seqlens",
        cached,
        (cached >= 0) & (cached <= capacity),
        f"lie in [0, {capacity}], the keys its table row can hold",
    )
    if lengths.kv_offset is None and lengths.total_seqlens is None:
        counted = cached >= q_len
        rule = "be at least the rows of its sequence, whose keys it counts"
        _check_entries("cache_seqlens", cached, counted, rule)
    offset, total = _check_parts(lengths, cached)
    begin, end = visible_keys(problem, q_len, cached, total - q_len - offset)
    block = np.arange(problem.max_blocks)
    first, last = begin // problem.block_size, -(-end // problem.block_size)
    live = (block >= first[:, None]) & (block < last[:, None]) & (end > begin)[:, None]
    rule = f"lie in [0, {problem.num_blocks}), being the id of a page that this call reads"
    _check_entries("block_table", table, ~live | ((table >= 0) & (table < problem.num_blocks)), rule)


def check_shifts(rel_logits: ShearedLogits, lengths: Lengths) -> None:
    """Raises ValueError for the first row that was sheared for another position than the lengths give it.

    Args:
      rel_logits: concrete.
      lengths: concrete, already checked.
    """
    shifts = _concrete("rel_logits.shifts", rel_logits.shifts)
    wanted = np.asarray(shifts_of_rows(len(shifts), lengths, rel_logits.rel_extent))
    for row in np.flatnonzero((wanted >= 0) & (shifts != wanted))[:1]:
        rule = f"be {wanted[row]}, from the position of that row"
        advice = "Shear with the cu_seqlens_q, cache_seqlens, kv_offset and total_seqlens of this call."
        raise refuse(f"rel_logits.shifts[{row}]", rule, int(shifts[row]), advice)


def check_plan(given: Any, wanted: Any) -> None:
    """Raises ValueError where a plan was made for other lengths than those of its call.

    Args:
      given: what the plan holds, concrete.
      wanted: what a plan of the call holds. Of kernels both hold the lengths, beside words that may be undefined.
    """
    pairs = zip(*(jax.tree.leaves(getattr(work, "lengths", work)) for work in (given, wanted)), strict=True)
    if not all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs):
        raise refuse("plan", "be made for the lengths of this call", "a plan of others", "Make one plan_batch a step.")


def visible_keys(
    problem: Problem, q_len: np.ndarray, kv_len: np.ndarray, first_pos: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns [begin, end) of the keys that some row of each sequence sees; empty where begin >= end."""
    begin, end = np.zeros_like(kv_len), kv_len.copy()
    if problem.window_left is not None:
        begin = np.maximum(begin, first_pos - problem.window_left)
    if problem.window_right is not None:
        end = np.minimum(end, first_pos + q_len + problem.window_right)
    return begin, np.where(q_len > 0, end, 0)


def _concrete(name: str, array: Any) -> np.ndarray:
    if isinstance(array, jax.core.Tracer):
        raise refuse(
            name, "be a concrete array", "a traced array", "check_batch runs on the host: call it outside jax.jit."
        )
    return np.asarray(array).astype(np.int64)


def _check_entries(name: str, values: np.ndarray, good: np.ndarray, rule: str) -> None:
    if good.all():
        return
    index = tuple(int(i) for i in np.argwhere(~good)[0])
    where = f"{name}[{', '.join(map(str, index))}]"
    raise refuse(where, rule, int(values[index]), f"{np.count_nonzero(~good)} entries of {name} break this rule.")


def _check_rows(problem: Problem, cu_seqlens_q: np.ndarray, max_seqlen_q: int) -> np.ndarray:
    """Returns the q_len of each sequence after checking the row offsets."""
    in_range = (cu_seqlens_q >= 0) & (cu_seqlens_q <= problem.num_tokens)
    _check_entries("cu_seqlens_q", cu_seqlens_q, in_range, f"lie in [0, {problem.num_tokens}], the rows of q")
    starts_at_zero = np.ones_like(in_range)
    starts_at_zero[:1] = cu_seqlens_q[:1] == 0
    _check_entries("cu_seqlens_q", cu_seqlens_q, starts_at_zero, "be 0")
    rising = np.concatenate([[True], cu_seqlens_q[1:] >= cu_seqlens_q[:-1]])
    _check_entries("cu_seqlens_q", cu_seqlens_q, rising, "be at least the entry before it")
    q_len = np.diff(cu_seqlens_q)
    _check_entries(
        "q_len (the step of cu_seqlens_q)", q_len, q_len <= max_seqlen_q, f"be at most max_seqlen_q = {max_seqlen_q}"
    )
    return q_len


def _check_parts(lengths: Lengths, cached: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (kv_offset, total_seqlens) after checking that a part with keys lies inside its sequence."""
    offset = np.zeros_like(cached) if lengths.kv_offset is None else _concrete("kv_offset", lengths.kv_offset)
    _check_entries("kv_offset", offset, _is_length(offset), f"lie in [0, {LENGTH_LIMIT}]")
    total = offset + cached if lengths.total_seqlens is None else _concrete("total_seqlens", lengths.total_seqlens)
    _check_entries("total_seqlens", total, _is_length(total), f"lie in [0, {LENGTH_LIMIT}]")
    inside = (cached == 0) | (offset + cached <= total)
    _check_entries("total_seqlens", total, inside, "be at least kv_offset + cache_seqlens of its sequence")
    return offset, total


def _is_length(values: np.ndarray) -> np.ndarray:
    return (values >= 0) & (values <= LENGTH_LIMIT)
