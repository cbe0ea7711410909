"""The portable backend's list of work: which rows make a q tile, which keys each q tile sees."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.core.errors import static_int
from inkling_pallas.core.problem import Lengths, Problem, Sequences
from inkling_pallas.core.safe_lengths import safe_sequences

_LARGEST = 2**20  # rows, keys or tiles that a step may have


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tile sizes: rows and keys of a tile, q tiles of a step."""

    block_q: int
    block_kv: int
    tiles_per_step: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            static_int(f"Config.{field.name}", getattr(self, field.name), 1, _LARGEST)


class Tiles(NamedTuple):
    """The q tiles of a batch, int32[tiles] each, longest first; a tile without rows is last and has `rows` 0."""

    sequence: jax.Array
    first_row: jax.Array  # within its sequence
    rows: jax.Array
    key_begin: jax.Array  # keys [begin, end) are seen by some row of the tile
    key_end: jax.Array
    bias_begin: jax.Array  # keys before this have dist >= rel_extent for every row


class Plan(NamedTuple):
    """What the layers of a step share."""

    sequences: Sequences
    tiles: Tiles


def plan(problem: Problem, config: Config, lengths: Lengths, interpret: bool = False) -> Plan:
    """Returns the q tiles of the batch, longest first. There is nothing to interpret."""
    del interpret
    sequences = safe_sequences(problem, lengths)
    return Plan(sequences, _list_tiles(problem, config, sequences))


def _list_tiles(problem: Problem, config: Config, sequences: Sequences) -> Tiles:
    per_sequence = (sequences.q_len + (config.block_q - 1)) // config.block_q
    ends = jnp.cumsum(per_sequence, dtype=jnp.int32)
    tile = lax.iota(jnp.int32, _num_tiles(problem, config))
    sequence = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    live = sequence < problem.batch_size
    sequence = jnp.minimum(sequence, problem.batch_size - 1)
    first_row = (tile - (ends - per_sequence)[sequence]) * config.block_q
    rows = jnp.where(live, jnp.clip(sequences.q_len[sequence] - first_row, 0, config.block_q), 0)
    begin, end, bias_begin = _key_range(problem, sequences, sequence, first_row, rows)
    unsorted = Tiles(sequence, first_row, rows, begin, end, bias_begin)
    work = jnp.where(rows > 0, end - begin + 1, 0)
    order = jnp.argsort(-work, stable=True).astype(jnp.int32)
    return jax.tree.map(lambda x: x[order], unsorted)


def _num_tiles(problem: Problem, config: Config) -> int:
    """Returns an upper bound of the number of q tiles, padded to whole steps."""
    sequences = min(problem.batch_size, problem.num_tokens)
    tiles = sequences + (problem.num_tokens - sequences) // config.block_q
    return math.ceil(tiles / config.tiles_per_step) * config.tiles_per_step


def _key_range(
    problem: Problem, sequences: Sequences, sequence: jax.Array, first_row: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (begin, end, bias_begin) in keys for each q tile, begin <= bias_begin <= end."""
    kv_len = sequences.kv_len[sequence]
    first = sequences.first_pos[sequence] + first_row
    last = first + rows - 1
    begin = jnp.zeros_like(kv_len) if problem.window_left is None else jnp.clip(first - problem.window_left, 0, kv_len)
    end = kv_len if problem.window_right is None else jnp.clip(last + (problem.window_right + 1), 0, kv_len)
    end = jnp.where(rows > 0, jnp.maximum(end, begin), begin)
    return begin, end, jnp.clip(first - (problem.rel_extent - 1), begin, end)
