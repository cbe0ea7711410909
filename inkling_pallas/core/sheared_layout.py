"""The sheared layout of the bias: rows that ascend in keys and start at a multiple of 8, so that tiles of keys line up.

Contract. Row t of the table belongs to the query row that stands at position p, counted in keys of its block table
(absolute position minus `kv_offset`, also where that is negative). Its column 0 is key

    start(p) = 8 * floor((p - rel_extent + 1) / 8)

and column c is key `start(p) + c`, at distance `p - start(p) - c`: the bias of that distance where
0 <= distance < rel_extent, and exactly 0 elsewhere. The row is `sheared_width(rel_extent)` long, which holds every
distance for every p. With `shift = (p - rel_extent + 1) mod 8`, column c is distance `rel_extent - 1 + shift - c`: what
a row holds depends on p through its shift alone, so a table fits any part of a sequence whose `kv_offset` differs by a
multiple of 8. Rows of no sequence are 0.

A plain row descends in keys and starts anywhere: a copy engine that wants starts of 16 bytes cannot fetch a tile of
several rows of it. Here a tile of keys from `key` on, a multiple of 8, starts at column `key - start(p)`, a multiple of
8, and that of the row after it at the same column or 8 before.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.core.describe import one_line_repr

ALIGNMENT = 8  # keys; 16 bytes of a 16-bit dtype
NO_ROW = -1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table", "shifts"], meta_fields=["rel_extent"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShearedLogits:
    """A bias in the sheared layout, which goes where `rel_logits` goes; a pytree.

    Made by `shear` and `sheared_relative_logits`.

    Attributes:
      table: [num_tokens, num_heads, sheared_width(rel_extent)] in the dtype of q; see the module for its rows.
      shifts: int32[num_tokens]; how many columns of a row stand before its furthest distance, 0 to 7; -1 in rows of no
        sequence. The operator finds a row's start by its own lengths: `check_batch` compares the two.
      rel_extent: static; distances that have a bias.
    """

    table: Any
    shifts: Any
    rel_extent: int
    __repr__ = one_line_repr

    @classmethod
    def shape(cls, num_tokens: int, num_heads: int, rel_extent: int, dtype: Any) -> Self:
        """Returns one of jax.ShapeDtypeStruct, for `plan_batch` and `explain`.

        Args:
          num_tokens: packed rows.
          num_heads: query heads.
          rel_extent: distances that have a bias.
          dtype: that of q.
        """
        shape = (num_tokens, num_heads, sheared_width(rel_extent))
        return cls(
            table=jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),
            shifts=jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
            rel_extent=rel_extent,
        )

    def plain(self) -> jax.Array:
        """Returns the same bias as a plain table, [num_tokens, num_heads, rel_extent]; 0 in rows of no sequence."""
        return unshear_rows(self.table, jnp.maximum(self.shifts, 0), self.rel_extent)


def sheared_width(rel_extent: int) -> int:
    """Returns the columns of a sheared row: the extent and the furthest shift, rounded up to a multiple of 8."""
    return -(-(rel_extent + ALIGNMENT - 1) // ALIGNMENT) * ALIGNMENT


def shift_of(position: Any, rel_extent: int) -> Any:
    """Returns how many columns of a row at a position stand before distance rel_extent - 1; 0 to 7."""
    return (position - (rel_extent - 1)) & (ALIGNMENT - 1)


def row_shifts(
    q_start: jax.Array, q_len: jax.Array, first_pos: jax.Array, *, num_tokens: int, rel_extent: int
) -> jax.Array:
    """Returns the shift of each packed row, int32[num_tokens]; -1 in rows of no sequence.

    Args:
      q_start: int32[batch], first packed row of each sequence; rows of different sequences do not overlap.
      q_len: int32[batch].
      first_pos: int32[batch], position of each sequence's first row, in keys of its block table.
      num_tokens: packed rows.
      rel_extent: distances that have a bias.
    """
    token = lax.iota(jnp.int32, num_tokens)
    row = token[:, None] - q_start[None, :]
    own = (row >= 0) & (row < q_len[None, :])
    # At most one sequence owns a row: one pass over (row, sequence) finds it, where a search would take several.
    position = jnp.where(own, first_pos[None, :] + row, 0).sum(axis=1, dtype=jnp.int32)
    return jnp.where(own.any(axis=1), shift_of(position, rel_extent), NO_ROW)


def shear_rows(rel_logits: jax.Array, shifts: jax.Array) -> jax.Array:
    """Returns the sheared table of plain rows, in plain jnp; the definition that the kernels are held to.

    Args:
      rel_logits: [num_tokens, num_heads, rel_extent].
      shifts: int32[num_tokens] from `row_shifts`.

    Returns:
      [num_tokens, num_heads, sheared_width(rel_extent)] in the same dtype.
    """
    extent = rel_logits.shape[-1]
    width = sheared_width(extent)
    padded = jnp.pad(rel_logits[..., ::-1], ((0, 0), (0, 0), (ALIGNMENT, width - extent)))
    start = ALIGNMENT - jnp.maximum(shifts, 0)
    table = jax.vmap(lambda row, first: lax.dynamic_slice_in_dim(row, first, width, axis=-1))(padded, start)
    return jnp.where((shifts >= 0)[:, None, None], table, jnp.zeros_like(table))


def unshear_rows(table: jax.Array, shifts: jax.Array, rel_extent: int) -> jax.Array:
    """Returns plain rows by distance from sheared ones: the inverse of `shear_rows` but for rows of no sequence.

    Args:
      table: [num_tokens, num_heads, sheared_width(rel_extent)].
      shifts: int32[num_tokens], 0 to 7.
      rel_extent: distances that have a bias.
    """
    rows = jax.vmap(lambda row, first: lax.dynamic_slice_in_dim(row, first, rel_extent, axis=-1))(table, shifts)
    return rows[..., ::-1]


def biases_of_rows(rel_logits: jax.Array | ShearedLogits, rows: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the biases by distance [t, q, num_heads, rel_extent] of packed rows [t, q].

    Args:
      rel_logits: of either layout.
      rows: int32[t, q], in bounds.
      position: int32[t, q], where they stand, counted in keys of the block table.
    """
    if not isinstance(rel_logits, ShearedLogits):
        return rel_logits[rows]
    extent = rel_logits.rel_extent
    sheared = rel_logits.table[rows.reshape(-1)]
    plain = unshear_rows(sheared, shift_of(position.reshape(-1), extent), extent)
    return plain.reshape(*rows.shape, *plain.shape[1:])
