"""How the table that the shear kernels write is cut into tiles: static sizes."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax import lax

from inkling_pallas.sheared import ALIGNMENT, sheared_width

ROWS = 64  # of a tile: those of a warpgroup's product
D_REL = 16  # of the relative query: one step of the tensor core
_WIDEST = 248  # columns of a tile; a copy takes 256
_CTAS = 396  # three for each SM of an H200


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShearTiles:
    """How a table is cut. Static."""

    num_tokens: int
    num_heads: int
    rel_extent: int
    dtype: Any
    interpret: bool
    projects: bool  # from the relative query, else from plain rows

    @classmethod
    def make(cls, shape: tuple[int, int, int], dtype: Any, interpret: bool, projects: bool = False) -> Self:
        """Returns how a table is cut, (num_tokens, num_heads, rel_extent).

        Raises:
          NotImplementedError: for what the kernels lack.
        """
        name, portable = np.dtype(dtype).name, "Use backend='portable'."
        if name not in ("bfloat16", "float16"):
            raise NotImplementedError(f"the dtype must be bfloat16 or float16 for the kernel; got {name}. {portable}")
        if not projects and shape[2] % ALIGNMENT:
            rule = f"be a multiple of {ALIGNMENT} for the kernel"
            raise NotImplementedError(f"rel_extent must {rule}; got {shape[2]}. {portable}")
        sizes = dict(zip(("num_tokens", "num_heads", "rel_extent"), shape, strict=True))
        return cls(**sizes, dtype=dtype, interpret=interpret, projects=projects)

    @property
    def width(self) -> int:
        """Columns of the table."""
        return sheared_width(self.rel_extent)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the table."""
        return (self.num_tokens, self.num_heads, self.width)

    @property
    def num_rows(self) -> int:
        """Rows of the table, (token, head)."""
        return self.num_tokens * self.num_heads

    @property
    def num_tiles(self) -> int:
        """Tiles of a chunk."""
        return -(-self.num_rows // ROWS)

    @property
    def block(self) -> int:
        """Columns of a chunk.

        An odd multiple of 8, so that the eight rows that a warp writes at once lie in different banks; of those the one
        that leaves least of the last chunk empty.
        """
        odd = range(_WIDEST, 64, -2 * ALIGNMENT)
        return min(odd, key=lambda block: -(-self.width // block) * block)

    @property
    def chunks(self) -> int:
        """Chunks of columns."""
        return -(-self.width // self.block)

    @property
    def window(self) -> int:
        """Distances that a chunk needs with any shift, an odd multiple of 8 as `block` is."""
        return self.block + 2 * ALIGNMENT

    @property
    def margin(self) -> int:
        """Distances before 0 that the last chunk asks for, at most."""
        return self.chunks * self.block

    @property
    def workers(self) -> int:
        """CTAs of a chunk."""
        return max(1, min(self.num_tiles, _CTAS // self.chunks))

    @property
    def num_stages(self) -> int:
        """Tiles whose source is in flight or in use."""
        return 3

    @property
    def tokens_of_tile(self) -> int:
        """Tokens that the rows of a tile belong to, at most."""
        if ROWS % self.num_heads == 0 or self.num_heads % ROWS == 0:
            return max(1, ROWS // self.num_heads)
        return -(-(ROWS - 1) // self.num_heads) + 1

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape of what the kernel writes: the card drops what lies past an array, the interpreter does not."""
        if not self.interpret:
            return (self.num_rows, self.width)
        return (self.num_tiles * ROWS, self.chunks * self.block)

    def token_of(self, row: Any) -> Any:
        """Returns which token a row belongs to."""
        heads = self.num_heads
        if heads & (heads - 1) == 0:
            return lax.shift_right_logical(row, jnp.full_like(row, heads.bit_length() - 1))
        return lax.div(row, jnp.full_like(row, heads))
