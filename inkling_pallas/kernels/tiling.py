"""How a problem is cut into tiles: static sizes that all phases share."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from inkling_pallas.problem import Problem

MAX_COLUMNS = 64  # query rows of a unit, which are the columns of a score tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a problem is cut. Static."""

    problem: Problem
    block_kv: int
    num_stages: int
    num_ctas: int
    interpret: bool = False

    @property
    def token_block(self) -> int:
        """Tokens of a unit: as many as fit, a power of two."""
        fitting = 1 << (MAX_COLUMNS // self.problem.group).bit_length() - 1
        return min(self.problem.max_seqlen_q, fitting)

    @property
    def token_blocks(self) -> int:
        """Units of a sequence of max_seqlen_q rows, per kv head."""
        return self.problem.max_seqlen_q // self.token_block

    @property
    def rows(self) -> int:
        """Query rows of a unit, (token, head of the group) in this order."""
        return self.token_block * self.problem.group

    @property
    def columns(self) -> int:
        """The same padded to what the matrix unit takes."""
        return -(-self.rows // 8) * 8

    @property
    def chunk(self) -> int:
        """Keys of one copy, dividing both a page and a tile; short under a window, whose edges lie inside a tile."""
        largest = self.block_kv if self.problem.window_left is None else 32
        return math.gcd(self.problem.block_size, self.block_kv, largest)

    @property
    def band_width(self) -> int:
        """Distances in a bias block: those of a tile, of its tokens, and the start's alignment.

        A 128-byte multiple in all.
        """
        needed = self.block_kv + self.token_block + 6
        step = max(8, 64 // math.gcd(64, self.rows))
        return -(-needed // step) * step

    @property
    def whole_units(self) -> bool:
        """True if no unit may be cut: the line then counts units and not tiles."""
        return self.problem.num_splits == 1

    @property
    def slots(self) -> int:
        """Partial results that the CTAs can leave behind: at most a unit's end and a unit's beginning each."""
        return 2 * self.num_ctas

    def token_of(self, row: Any) -> Any:
        """Returns which token of a unit a row belongs to."""
        group = self.problem.group
        if group & (group - 1) == 0:
            return lax.shift_right_logical(row, jnp.full_like(row, group.bit_length() - 1))
        return lax.div(row, jnp.full_like(row, group))
