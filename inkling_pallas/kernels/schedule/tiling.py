"""How a problem is cut into tiles: static sizes that all phases share."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from inkling_pallas.core.integers import div
from inkling_pallas.core.problem import Problem

# What a merge costs, in keys that a CTA reads meanwhile. NVIDIA H200, jax 0.11.2, 2026-11-30, windows of 512 keys: 64
# units 11.4 us cut and 10.4 whole (at most 264 keys more than an equal share), 16 units 7.7 and 8.7 (450 keys more).
_MERGE_KEYS = 320
MAX_COLUMNS = 64  # query rows of a unit, which are the columns of a score tile
_FEW_TILES = 3  # of a CTA, which would wait long for one more
BLOCKS_KV = (64, 128)  # keys of a tile
MOST_STAGES = 16
MOST_CTAS = 2**14
LINE_LIMIT = 2**30  # positions on a line of work: sums of two are int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a problem is cut. Static."""

    problem: Problem
    block_kv: int
    num_stages: int
    num_ctas: int
    interpret: bool = False
    cluster_axis: str | None = None  # along which K and V are copied for several CTAs at once
    clears_rows: bool = True  # the rows of no sequence; else another kernel of the call does
    fewest_rows: int = 1  # of a sequence; those with fewer are another kernel's
    call_max_seqlen_q: int | None = None  # of the call, where sequences with more rows are another kernel's
    ranks: int = 1  # CTAs of a cluster, which share each unit and merge what they found

    @property
    def whole_problem(self) -> Problem:
        """The problem of the call."""
        longest = self.call_max_seqlen_q or self.problem.max_seqlen_q
        return dataclasses.replace(self.problem, max_seqlen_q=longest)

    @property
    def token_block(self) -> int:
        """Tokens of a unit: as many as fit, a power of two."""
        columns = MAX_COLUMNS if self.problem.head_dim <= 128 else MAX_COLUMNS // 2  # what shared memory holds
        fitting = 1 << max(1, columns // self.problem.group).bit_length() - 1
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
    def band_span(self) -> int:
        """Elements of a row that a bias block needs: the keys of a tile, its tokens, and the start's alignment."""
        if self.problem.sheared:  # Starts of the tokens' rows are at steps of 8.
            return self.block_kv + (self.token_block + 6) // 8 * 8
        return self.block_kv + self.token_block + 6

    @property
    def band_width(self) -> int:
        """Elements of a row of a bias block.

        A 128-byte multiple in all.
        """
        step = max(8, 64 // math.gcd(64, self.rows))
        width = -(-self.band_span // step) * step
        # Rows of 8 modulo 16 elements: the eight that an aligned load takes at once then lie in different banks.
        return width + 8 if self.problem.sheared and step == 8 and width % 16 == 0 else width

    @property
    def whole_units(self) -> bool:
        """True if no unit may be cut, but among the CTAs of a cluster: the line then counts units and not tiles.

        Nothing is left for a second kernel to merge, whose start costs; a single CTA cuts none. Under a window, whose
        units are short, that is the choice where no CTA gets much more than an equal share of the keys of full windows.
        """
        problem = self.problem
        if self.ranks > 1 or self.num_ctas == 1:
            return True
        if problem.num_splits is not None or problem.window_left is None:
            return problem.num_splits == 1
        keys = min(problem.max_kv_len, problem.window_left + self.token_block)
        longest = -(-self.most_units // self.num_ctas) * keys
        return longest * self.num_ctas - self.most_units * keys <= _MERGE_KEYS * self.num_ctas

    @property
    def rank_width(self) -> int:
        """Elements of each row that a CTA of a cluster merges."""
        return self.problem.head_dim // self.ranks

    @property
    def most_units(self) -> int:
        """Units that the static facts allow a batch."""
        return self.problem.batch_size * self.problem.num_kv_heads * self.token_blocks

    @property
    def unit_lead(self) -> int:
        """Positions on the line before the tiles of a unit, for what starting and ending one costs.

        Without it the CTAs with many short units end last: one sequence of 262,144 keys among 31 of 1,024 took
        288.6 us, with one position 281.0, with two 283.2 (NVIDIA H200, jax 0.11.2, 2026-11-30).
        """
        return 0 if self.whole_units or self.most_tiles < _FEW_TILES * self.num_ctas else 1

    @property
    def most_tiles(self) -> int:
        """KV tiles that the static facts allow a batch, its windows aligned with tiles."""
        problem = self.problem
        keys = problem.max_kv_len
        if problem.window_left is not None:
            keys = min(keys, problem.window_left + problem.max_seqlen_q)
        return self.most_units * -(-keys // self.block_kv)

    @property
    def most_positions(self) -> int:
        """How long the static facts allow the line of work to be, windows wherever they may begin in a tile."""
        per_unit = self.unit_lead + (self.problem.window_left is not None)
        return self.most_tiles + self.most_units * per_unit

    @property
    def slots(self) -> int:
        """Partial results that the CTAs can leave behind: at most a unit's end and a unit's beginning each."""
        return 2 * self.num_ctas

    def token_of(self, row: Any) -> Any:
        """Returns which token of a unit a row belongs to."""
        group = self.problem.group
        if group & (group - 1) == 0:
            return lax.shift_right_logical(row, jnp.full_like(row, group.bit_length() - 1))
        return div(row, jnp.full_like(row, group))


WARPGROUPS = 2  # that compute, in the prefill kernel
ROWS = 64  # of a matrix product of one warpgroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowTiling(Tiling):
    """How the prefill kernel cuts a problem: query rows are the rows of the products, `rows` of 64 per warpgroup.

    A tile of the schedule is `tile_tokens` tokens of one kv head, `token_block` of them for each warpgroup of each of
    `cluster_size` CTAs, which walk the same keys.
    """

    cluster_size: int = 1
    band_slots: int = 2
    overlap: bool = False  # the softmax of a KV tile runs beside the product with the values of the one before

    @property
    def token_block(self) -> int:
        """Tokens of a warpgroup: as many as fit, a power of two."""
        return 1 << (ROWS // self.problem.group).bit_length() - 1

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return self.cluster_size * WARPGROUPS * self.token_block

    @property
    def num_clusters(self) -> int:
        """Clusters of the grid."""
        return self.num_ctas // self.cluster_size

    @property
    def max_items(self) -> int:
        """Most tiles of one kv head that sequences sharing num_tokens rows can have."""
        problem = self.problem
        longest = -(-problem.max_seqlen_q // self.tile_tokens)
        return min(problem.num_tokens // self.tile_tokens + problem.batch_size, longest * problem.batch_size)

    @property
    def chunk(self) -> int:
        """Keys of one copy, dividing both a page and a tile."""
        return math.gcd(self.problem.block_size, self.block_kv)

    @property
    def band_width(self) -> int:
        """Elements of a row of a bias block."""
        return self._pitch(self.band_span)

    @property
    def shares_ring(self) -> bool:
        """True if query rows travel through the ring of bias blocks, whose rows are long enough for them."""
        return self.band_width >= self.problem.head_dim

    @property
    def query_width(self) -> int:
        """Elements between query rows as copied."""
        return self.band_width if self.shares_ring else self._pitch(self.problem.head_dim)

    def _pitch(self, needed: int) -> int:
        """Returns a length of rows, such that a block of them is a 128-byte multiple.

        If possible 8 modulo 16 elements: then the eight rows that a warp reads at once lie in different banks.
        """
        widths = range(-(-needed // 8) * 8, 257, 8)
        fitting = [width for width in widths if width % 16 == 8 and self.rows * width % 64 == 0]
        return min(fitting, default=-(-needed // 64) * 64)

    @property
    def query_items(self) -> int:
        """Slots of the ring that the query rows of a tile take."""
        return 1 if self.shares_ring else 0

    @property
    def scales_queries(self) -> bool:
        """True if the softmax scale goes into the query rows, which is exact: a power of two, and enough exponents."""
        scale = self.problem.softmax_scale
        return self.problem.dtype == "bfloat16" and scale > 0 and math.frexp(scale)[0] == 0.5
