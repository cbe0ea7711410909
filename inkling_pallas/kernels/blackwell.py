"""Assembly and launch for sm_100 and sm_110: what is supported, and the kernels of a call in order.

Interpreted and assembled; never run on a card.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.kernels import listing, tensor_launch
from inkling_pallas.kernels.tensor_tiling import TensorTiling
from inkling_pallas.kernels.worklist import Worklist
from inkling_pallas.problem import Lengths, Operands, Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning choices: keys of a tile, tiles in flight, bias blocks in flight, CTAs (one per SM), and what they walk.

    With `splits` CTAs take equal shares of all keys, else whole tiles of query rows.
    """

    block_kv: int = 64
    num_stages: int = 3
    band_slots: int = 1
    num_ctas: int = 148
    splits: bool = False


def tiling_of(problem: Problem, config: Config, interpret: bool = False) -> TensorTiling:
    """Returns how the kernel cuts a problem."""
    return TensorTiling(problem=problem, interpret=interpret, **dataclasses.asdict(config))


class Plan(NamedTuple):
    """What the layers of a step share: the caller's lengths, and a list of tiles."""

    lengths: Lengths
    work: Worklist | None


def plan(problem: Problem, config: Config, lengths: Lengths, interpret: Any = False) -> Plan:
    """Returns the plan of a step."""
    if config.splits:
        return Plan(lengths, None)
    return Plan(lengths, listing.make_worklist(lengths, tiling_of(problem, config, bool(interpret)), interpret))


def attend(
    problem: Problem, config: Config, operands: Operands, plan: Plan, interpret: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns attention and, if asked for, its log-sum-exp. See `inkling_rel_attention`.

    Returns:
      out_dtype[num_tokens, num_heads, head_dim], float32[num_tokens, num_heads] or None.
    """
    shape = (problem.num_tokens, problem.num_heads, problem.head_dim)
    rows = problem.num_tokens * problem.num_heads
    out = lax.empty(shape, jnp.dtype(problem.out_dtype)) if operands.out is None else operands.out
    results = (out.reshape(rows, problem.head_dim),) + (lax.empty((rows, 1), jnp.float32),) * problem.return_lse
    tiling = tiling_of(problem, config, bool(interpret))
    results = tensor_launch.attend(operands, plan.work or plan.lengths, results, tiling, interpret)
    return results[0].reshape(shape), results[1].reshape(shape[:2]) if problem.return_lse else None
