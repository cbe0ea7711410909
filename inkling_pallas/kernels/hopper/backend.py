"""Assembly and launch for sm_90: what is supported, and the kernels of a call in order."""

from typing import Any, NamedTuple

import jax

from inkling_pallas.core.devices import H200, Card
from inkling_pallas.core.problem import Lengths, Operands, Problem
from inkling_pallas.kernels.hopper import decode_launch, prefill_launch
from inkling_pallas.kernels.hopper.configs import (
    Config,
    candidates,
    config_fits,
    few_rows_of,
    has_many_rows,
    most_positions,
    row_tiling_of,
    tiling_of,
)
from inkling_pallas.kernels.phases.operands import outputs_of, results_of
from inkling_pallas.kernels.schedule import tile_list_kernel
from inkling_pallas.kernels.schedule.tile_list import Worklist
from inkling_pallas.kernels.schedule.tiling import LINE_LIMIT

__all__ = ["Config", "Plan", "attend", "choose_config", "config_fits", "plan", "unsupported"]


def unsupported(problem: Problem, card: Card = H200) -> str | None:
    """Returns why this backend does not take a problem, or None if it does."""
    p, portable = problem, 'Use backend="portable".'
    rules: list[tuple[bool, str]] = [
        (p.causal, "causal must be True on Hopper; got False."),
        (p.dtype in ("bfloat16", "float16"), f"q must have dtype bfloat16 or float16 on Hopper; got {p.dtype}."),
        (p.head_dim in (64, 128, 256), f"head_dim must be 64, 128 or 256 on Hopper; got {p.head_dim}."),
        (p.group <= 16, f"num_heads / num_kv_heads must be at most 16 on Hopper; got {p.group}."),
        (p.block_size % 8 == 0, f"block_size must be a multiple of 8 on Hopper; got {p.block_size}."),
        (p.sheared or p.rel_extent % 8 == 0, f"rel_extent must be a multiple of 8 on Hopper; got {p.rel_extent}."),
        (
            not has_many_rows(p) or p.head_dim != 256,
            f"head_dim must be 64 or 128 for max_seqlen_q = {p.max_seqlen_q} on Hopper; got {p.head_dim}.",
        ),
        (
            most_positions(p) < LINE_LIMIT,
            f"the rows and keys of a batch must make fewer than 2**30 tiles on Hopper; got {most_positions(p)}.",
        ),
        (not p.is_empty, "the batch and the cache must not be empty on Hopper; got an empty shape."),
    ]
    for holds, sentence in rules:
        if not holds:
            return f"{sentence} {portable}"
    if not candidates(problem, card):
        return f"batch_size must leave room for its lengths in shared memory on Hopper; got {p.batch_size}. {portable}"
    return None


def choose_config(problem: Problem, card: Card = H200) -> Config:
    """Returns the first configuration that fits; the order is that of measurements on an H200."""
    return candidates(problem, card)[0]


class Plan(NamedTuple):
    """What the layers of a step share: the caller's lengths, of which kernels make a table each, and a list of tiles.

    The decode kernel needs no list.
    """

    lengths: Lengths
    work: Worklist | None


def plan(problem: Problem, config: Config, lengths: Lengths, interpret: Any = False) -> Plan:
    """Returns the plan of a step."""
    if config.program == "decode":
        return Plan(lengths, None)
    return Plan(
        lengths, tile_list_kernel.make_worklist(lengths, row_tiling_of(problem, config, bool(interpret)), interpret)
    )


def attend(
    problem: Problem, config: Config, operands: Operands, plan: Plan, interpret: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns attention and, if asked for, its log-sum-exp. See `inkling_rel_attention`.

    Returns:
      out_dtype[num_tokens, num_heads, head_dim], float32[num_tokens, num_heads] or None.
    """
    results = outputs_of(operands, problem)
    if plan.work is None:
        results = decode_launch.attend(
            operands, plan.lengths, results, tiling_of(problem, config, bool(interpret)), interpret
        )
    else:
        if config.few_rows is not None:
            more = {"clears_rows": False, "call_max_seqlen_q": problem.max_seqlen_q}
            tiling = tiling_of(few_rows_of(problem), config.few_rows, bool(interpret), **more)
            results = decode_launch.attend(operands, plan.lengths, results, tiling, interpret)
        tiling = row_tiling_of(problem, config, bool(interpret))
        results = prefill_launch.attend(operands, plan.work, results, tiling, interpret)
    return results_of(results, problem)
