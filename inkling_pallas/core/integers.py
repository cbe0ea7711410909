"""Division and shifts of int32 by static ints, which `jax.enable_x64` would make int64 and so refuse.

With it a Python int beside an int32 is one of 64 bits in `jax.lax`, where dtypes must be equal. Kernels have no int64.
"""

from typing import Any

import jax
import numpy as np
from jax import lax


def div(x: jax.Array, y: jax.Array | int) -> jax.Array:
    """Returns x / y rounded towards 0."""
    return lax.div(x, _int32(y))


def rem(x: jax.Array, y: jax.Array | int) -> jax.Array:
    """Returns x - div(x, y) * y."""
    return lax.rem(x, _int32(y))


def shift_left(x: jax.Array, y: int) -> jax.Array:
    """Returns x * 2**y."""
    return lax.shift_left(x, _int32(y))


def shift_right(x: jax.Array, y: int) -> jax.Array:
    """Returns x / 2**y rounded down."""
    return lax.shift_right_arithmetic(x, _int32(y))


def shift_right_logical(x: jax.Array, y: int) -> jax.Array:
    """Returns x / 2**y rounded down, for x that are not negative."""
    return lax.shift_right_logical(x, _int32(y))


def _int32(y: Any) -> Any:
    return np.int32(y) if isinstance(y, int) else y
