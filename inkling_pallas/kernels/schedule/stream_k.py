"""How CTAs share the line of work: equal parts of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inkling_pallas.core.integers import div, rem
from inkling_pallas.kernels.schedule.seq_table import Table
from inkling_pallas.kernels.schedule.tiling import Tiling


class Line(NamedTuple):
    """The line of work and the CTAs that share it: each has `size` positions, the first `longer` of them one more."""

    length: jax.Array
    shares: jax.Array
    size: jax.Array
    longer: jax.Array


def make_line(table: Table, tiling: Tiling) -> Line:
    """Returns the line of a batch. Shares are lengthened until no unit can be cut into more than num_splits pieces."""
    problem = tiling.problem
    length = table.at(4, problem.batch_size - 1) * problem.num_kv_heads
    if problem.num_splits is None or tiling.whole_units:
        return share_line(length, tiling.num_ctas)
    cuts = problem.num_splits - 1
    longest = table.at(6, problem.batch_size - 1)
    share = jnp.maximum(div(longest + (cuts - 2), cuts), 1)
    return share_line(length, jnp.clip(div(length, share), 1, tiling.num_ctas))


def share_line(length: jax.Array, shares: Any) -> Line:
    """Returns the line cut into equal shares, or into single positions if there are fewer of them than shares.

    A static number of shares is worth it: a division by a traced one delays the first copy of the kernel.
    """
    few = length < shares
    size = jnp.where(few, 1, div(length, shares))
    longer = jnp.where(few, 0, rem(length, shares))
    return Line(length, jnp.minimum(length, shares), size, longer)


def share_start(line: Line, cta: Any) -> jax.Array:
    """Returns where on the line the share of a CTA starts."""
    cta = jnp.minimum(cta, line.shares)
    return cta * line.size + jnp.minimum(cta, line.longer)


def share_of(line: Line, position: jax.Array) -> jax.Array:
    """Returns the CTA whose share holds a position of the line."""
    in_longer = div(position, line.size + 1)
    in_shorter = line.longer + div(position - line.longer * (line.size + 1), line.size)
    return jnp.where(in_longer < line.longer, in_longer, in_shorter)
