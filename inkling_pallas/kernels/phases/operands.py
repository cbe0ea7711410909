"""What the attention kernels read in global memory, and the arrays that they write."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.core.problem import Operands, Problem
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.phases import bias, pages
from inkling_pallas.kernels.schedule.tiling import Tiling


class Gmem(NamedTuple):
    """Arrays in global memory; caches in chunks."""

    q: Any
    key: Any
    value: Any
    block_table: Any
    rel_logits: Any
    plan: Any  # what says which CTA does what: `Lengths` where keys are split, else a `Worklist`


def in_global_memory(operands: Operands, plan: Any, tiling: Tiling) -> Gmem:
    """Returns the arrays as a kernel takes them."""
    return Gmem(
        q=operands.q,
        key=pages.split_pages(operands.cache_arrays[0], tiling),
        value=pages.split_pages(operands.cache_arrays[-1], tiling),
        block_table=operands.block_table,
        rel_logits=bias.pad_for_interpreter(operands.rel_logits, tiling),
        plan=plan,
    )


def outputs_of(operands: Operands, problem: Problem) -> tuple[jax.Array, ...]:
    """Returns the outputs before any is written, as rows of one head: out and, if asked for, the log-sum-exp.

    Kernels write them in place, so they pass `apart` on both sides.
    """
    rows = problem.num_tokens * problem.num_heads
    out = operands.out
    if out is None:
        out = lax.empty((problem.num_tokens, problem.num_heads, problem.head_dim), jnp.dtype(problem.out_dtype))
    lse = (lax.empty((rows, 1), jnp.float32),) * problem.return_lse
    return mosaic.apart((out.reshape(rows, problem.head_dim), *lse))


def results_of(outputs: tuple[jax.Array, ...], problem: Problem) -> tuple[jax.Array, jax.Array | None]:
    """Returns the outputs in the shapes of the operator's results."""
    outputs = mosaic.apart(outputs)
    shape = (problem.num_tokens, problem.num_heads)
    lse = outputs[1].reshape(shape) if problem.return_lse else None
    return outputs[0].reshape(*shape, problem.head_dim), lse
