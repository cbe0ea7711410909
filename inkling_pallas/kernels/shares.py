"""How CTAs share the line of work: equal parts of it, or as many whole units each where that costs nothing."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.kernels.table import Table
from inkling_pallas.kernels.tiling import Tiling

_MERGE_KEYS = 128


class Line(NamedTuple):
    """The line of work and the CTAs that share it: each has `size` grains, the first `longer` of them one more."""

    length: jax.Array  # tiles
    shares: jax.Array
    size: jax.Array
    longer: jax.Array
    grain: Any  # tiles


def make_line(table: Table, tiling: Tiling) -> Line:
    """Returns the line of a batch. Shares are lengthened until no unit can be cut into more than num_splits pieces."""
    problem = tiling.problem
    length = table.at(4, problem.batch_size - 1) * problem.num_kv_heads
    if problem.num_splits is None or problem.num_splits == 1:
        return share_line(length, tiling.num_ctas, _grain(length, table, tiling))
    cuts = problem.num_splits - 1
    longest = table.at(6, problem.batch_size - 1)
    share = jnp.maximum(lax.div(longest + (cuts - 2), cuts), 1)
    return share_line(length, jnp.clip(lax.div(length, share), 1, tiling.num_ctas))


def _grain(length: jax.Array, table: Table, tiling: Tiling) -> Any:
    """Returns of how many tiles a share is a multiple: of a unit, where no share is much longer for it.

    Then nothing is left to merge, which takes the time of about a tile of 128 keys (H200, jax 0.11.2, 2026-11-30, 32
    sequences of 8,192 keys under a window: 39.2 us, with num_splits=1 37.3). Units are of one length where all
    sequences fill their window; where they only seem to be, the shares are as they would be.
    """
    if tiling.problem.window_left is None or tiling.token_blocks > 1 or tiling.whole_units:
        return 1
    unit, ctas = jnp.maximum(table.at(6, tiling.problem.batch_size - 1), 1), tiling.num_ctas
    units = lax.div(length, unit)
    longest = lax.div(units + (ctas - 1), ctas) * unit
    excess = longest - lax.div(length + (ctas - 1), ctas)
    return jnp.where((units * unit == length) & (excess * tiling.block_kv <= _MERGE_KEYS), unit, 1)


def share_line(length: jax.Array, shares: Any, grain: Any = 1) -> Line:
    """Returns the line cut into equal shares, or into single grains if there are fewer grains than shares.

    A static number of shares is worth it: a division by a traced one delays the first copy of the kernel.
    """
    grains = _whole_grains(length, grain)
    few = grains < shares
    size = jnp.where(few, 1, lax.div(grains, shares))
    longer = jnp.where(few, 0, lax.rem(grains, shares))
    return Line(length, jnp.minimum(grains, shares), size, longer, grain)


def _whole_grains(tiles: jax.Array, grain: Any) -> jax.Array:
    return tiles if isinstance(grain, int) else lax.div(tiles, grain)


def share_start(line: Line, cta: Any) -> jax.Array:
    """Returns where on the line the share of a CTA starts."""
    cta = jnp.minimum(cta, line.shares)
    return (cta * line.size + jnp.minimum(cta, line.longer)) * line.grain


def share_of(line: Line, position: jax.Array) -> jax.Array:
    """Returns the CTA whose share holds a position of the line."""
    grain = _whole_grains(position, line.grain)
    in_longer = lax.div(grain, line.size + 1)
    in_shorter = line.longer + lax.div(grain - line.longer * (line.size + 1), line.size)
    return jnp.where(in_longer < line.longer, in_longer, in_shorter)
