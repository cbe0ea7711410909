"""Made-up keys, values and queries of a request at a position, made again on the host without reading a cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.relative_bias import log_scaling, relative_logits

_TABLE_ROWS = 256
_D_REL = 16


class Tables(NamedTuple):
    """Random tables of all layers of a kind: a row is the sum of an entry of each half, 65,536 different ones.

    Attributes:
      kv: float32[layers, 2, 256, 2 * num_kv_heads, head_dim].
      q: float32[layers, 2, 256, num_heads, head_dim].
      r: float32[layers, 2, 256, num_heads, d_rel].
      projection: float32[layers, d_rel, rel_extent].
    """

    kv: Any
    q: Any
    r: Any
    projection: Any

    def layer(self, index: int) -> "Tables":
        """Returns the tables of one layer, without their first axis."""
        return Tables(*(table[index] for table in self))


def make_tables(seed: int, *, layers: int, num_heads: int, num_kv_heads: int, head_dim: int, rel_extent: int) -> Tables:
    """Returns tables whose rows have unit variance; those of q are larger, so that scores have unit variance, too."""
    rng = np.random.default_rng(seed)

    def normal(scale: float, *shape: int) -> np.ndarray:
        return np.float32(scale) * rng.standard_normal((layers, *shape), np.float32)

    half = 0.5**0.5
    return Tables(
        kv=normal(half, 2, _TABLE_ROWS, 2 * num_kv_heads, head_dim),
        q=normal(half * head_dim**0.5, 2, _TABLE_ROWS, num_heads, head_dim),
        r=normal(half, 2, _TABLE_ROWS, num_heads, _D_REL),
        projection=normal(_D_REL**-0.5, _D_REL, rel_extent),
    )


def table_rows(request: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Returns int32[2, n], which entry of each half stands for a position of a request: a hash of both."""
    bits = request.astype(np.uint32) * np.uint32(0x9E3779B1) ^ position.astype(np.uint32) * np.uint32(0x85EBCA77)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        bits = (bits ^ bits >> np.uint32(shift)) * np.uint32(factor)
    return np.stack([bits >> np.uint32(8), bits >> np.uint32(20)]).astype(np.int32) % _TABLE_ROWS


def keys_and_values(tables: Tables, rows: Any, dtype: Any) -> tuple[Any, Any]:
    """Returns K and V [n, num_kv_heads, head_dim] of one layer; the same bits from NumPy and from jax.

    Args:
      tables: of one layer.
      rows: int32[2, n] from `table_rows`.
      dtype: of the cache.
    """
    both = (tables.kv[0][rows[0]] + tables.kv[1][rows[1]]).astype(dtype)
    heads = both.shape[1] // 2
    return both[:, :heads], both[:, heads:]


def queries(tables: Tables, rows: jax.Array, tau: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns q [n, num_heads, head_dim] and rel_logits [n, num_heads, rel_extent] of one layer.

    Args:
      tables: of one layer.
      rows: int32[2, n] from `table_rows`.
      tau: float32[n], temperatures.
      dtype: of both.
    """
    q = (tables.q[0][rows[0]] + tables.q[1][rows[1]]) * tau[:, None, None]
    r = (tables.r[0][rows[0]] + tables.r[1][rows[1]]).astype(dtype)
    return q.astype(dtype), relative_logits(r, tables.projection.astype(dtype), tau)


def temperatures(positions: jax.Array, *, is_global: bool) -> jax.Array:
    """Returns Inkling's temperature of each row: 1 in local layers."""
    return log_scaling(positions) if is_global else jnp.ones(positions.shape, jnp.float32)
