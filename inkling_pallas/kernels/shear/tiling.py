"""How the table that the shear kernels write is cut into tiles: static sizes."""

import dataclasses
import math
from typing import Any, Self

import numpy as np

from inkling_pallas.core.devices import H200, Card
from inkling_pallas.core.integers import div, shift_right_logical
from inkling_pallas.core.sheared_layout import ALIGNMENT, sheared_width
from inkling_pallas.kernels.mosaic.ptx.sheared_stores import ROWS

D_REL = 16  # of the relative query: one step of the tensor core
THREADS = 128
_MARGIN = 4 * 1024  # barriers, and what the compiler adds to align buffers
_LINE = 128  # elements; copies of whole lines are the fastest
_BOX = 256  # lines that one copy takes at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShearTiles:
    """How a table is cut. Static."""

    num_tokens: int
    num_heads: int
    rel_extent: int
    dtype: Any
    interpret: bool
    projects: bool  # from the relative query, else from plain rows
    card: Card = H200

    @classmethod
    def make(cls, source: Any, rel_extent: int, interpret: bool, *, projects: bool = False, card: Card = H200) -> Self:
        """Returns how the table is cut that is made from `source`, [num_tokens, num_heads, d_rel or rel_extent].

        Raises:
          NotImplementedError: for what the kernels lack.
        """
        num_tokens, num_heads, width = source.shape
        sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "rel_extent": rel_extent, "dtype": source.dtype}
        tiles = cls(**sizes, interpret=interpret, projects=projects, card=card)
        name, room = np.dtype(source.dtype).name, tiles.smem_bytes(*tiles.buffers) <= tiles.card.cta_smem
        rules: list[tuple[bool, str]] = [
            (not projects or width == D_REL, f"r must have d_rel = {D_REL}; got {width}."),
            (name in ("bfloat16", "float16"), f"the dtype must be bfloat16 or float16 for the kernel; got {name}."),
            (
                projects or rel_extent % ALIGNMENT == 0,
                f"rel_extent must be a multiple of {ALIGNMENT} for the kernel; got {rel_extent}.",
            ),
            (rel_extent >= 2, f"rel_extent must be at least 2 for the kernel; got {rel_extent}."),
            (room, f"rel_extent must leave room for 16 rows in shared memory for the kernel; got {rel_extent}."),
        ]
        for holds, sentence in rules:
            if not holds:
                raise NotImplementedError(f"{sentence} Use backend='portable'.")
        return tiles

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
    def padded_rows(self) -> int:
        """Rows that the kernel reads and writes: the card drops what lies past an array, the interpreter does not."""
        return self.num_tiles * ROWS if self.interpret else self.num_rows

    @property
    def num_tiles(self) -> int:
        """Tiles of the table."""
        return -(-self.num_rows // ROWS)

    @property
    def source_width(self) -> int:
        """Elements of a row that the kernel reads."""
        return D_REL if self.projects else self.rel_extent

    @property
    def projection_columns(self) -> int:
        """Columns of the projection in shared memory: those of any shift, and a multiple of the threads."""
        return -(-(self.width + ALIGNMENT) // THREADS) * THREADS

    @property
    def buffers(self) -> tuple[int, int]:
        """Tiles whose source is in flight or in use, and tiles whose result is: the most that fit."""
        sizes = [(3, 2), (2, 2), (2, 1)]
        return next((size for size in sizes if self.smem_bytes(*size) <= self.card.cta_smem), sizes[-1])

    def smem_bytes(self, sources: int, results: int) -> int:
        """Returns what a CTA takes."""
        projection = D_REL * self.projection_columns if self.projects else 0
        return 2 * (projection + ROWS * (sources * self.source_width + results * self.width)) + _MARGIN

    @property
    def workers(self) -> int:
        """CTAs: two for each SM where they fit."""
        of_sm = 2 if 2 * self.smem_bytes(*self.buffers) <= self.card.cta_smem else 1
        return max(1, min(self.num_tiles, of_sm * self.card.num_sms))

    @property
    def tokens_of_tile(self) -> int:
        """Tokens that the rows of a tile belong to, at most."""
        if ROWS % self.num_heads == 0 or self.num_heads % ROWS == 0:
            return max(1, ROWS // self.num_heads)
        return -(-(ROWS - 1) // self.num_heads) + 1

    def lines(self, width: int) -> tuple[int, int]:
        """Returns rows of some width as whole lines: (lines of a tile, elements of a line)."""
        line = math.gcd(self.num_rows * width, _LINE)
        return ROWS * width // line, line

    def boxes(self, width: int) -> list[slice]:
        """Returns the lines of each copy of a tile."""
        lines, _ = self.lines(width)
        return [slice(start, min(start + _BOX, lines)) for start in range(0, lines, _BOX)]

    def token_of(self, row: Any) -> Any:
        """Returns which token a row belongs to."""
        heads = self.num_heads
        if heads & (heads - 1) == 0:
            return shift_right_logical(row, heads.bit_length() - 1)
        return div(row, heads)
