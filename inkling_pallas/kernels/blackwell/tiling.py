"""How the kernel for sm_100 cuts a problem: static sizes, and the columns of tensor memory that they take."""

import dataclasses
from typing import Any

from inkling_pallas.core.integers import div, rem
from inkling_pallas.kernels.mosaic.tmem_rows import LANES
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS, RowTiling, Tiling

TENSOR_COLUMNS = 512  # of tensor memory, 32 bits wide
_MAX_TOKENS = 64  # of a warpgroup: more would make bias blocks too long


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorTiling(RowTiling):
    """As `RowTiling`, with 128 rows for each of two softmax warpgroups: a lane of tensor memory is a query row.

    With `splits` the work is the pieces of `split_kv`, few rows with many keys: both warpgroups have the same rows and
    take KV tiles by turns, and what they found is merged at the end. KV tiles are counted over all the work of a CTA.
    """

    splits: bool = False

    @property
    def token_block(self) -> int:
        """Tokens of a warpgroup: as many as fit, a power of two."""
        if self.splits:
            return Tiling.token_block.__get__(self)
        return min(1 << (LANES // self.problem.group).bit_length() - 1, _MAX_TOKENS)

    @property
    def shares_ring(self) -> bool:
        """False: query rows do not pass through the ring of bias blocks."""
        return False

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory: scores, weights in 16 bits, and sums of both warpgroups."""
        return WARPGROUPS * (self.block_kv + self.block_kv // 2 + self.problem.head_dim)

    @property
    def stride(self) -> int:
        """KV tiles from one of a warpgroup to its next."""
        return WARPGROUPS if self.splits else 1

    def warpgroups_of(self, count: Any) -> list[Any]:
        """Returns those that take the KV tile before which the CTA had `count`."""
        return [rem(count, WARPGROUPS)] if self.splits else list(range(WARPGROUPS))

    @property
    def note_slots(self) -> int:
        """Notes of absent pages that are kept: `scratch` says why so many."""
        return self.num_stages + self.stride

    def note_slot(self, count: Any) -> Any:
        """Returns where the note of a KV tile is, by how many the CTA had before."""
        return rem(count, self.note_slots)

    def band_slot(self, count: Any) -> Any:
        """Returns where the bias block of that KV tile is."""
        return rem(div(count, self.stride), self.band_slots)
