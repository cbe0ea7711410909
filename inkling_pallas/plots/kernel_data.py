"""What the kernels' own phases say of a batch, as NumPy: bands of a tile, the bias block of a tile, shares, merging.

Nothing is computed again here: `tile_list`, `split_kv`, `wgmma_rows` and `softmax` are what the kernels run.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.core import sheared_layout
from inkling_pallas.core.devices import H200
from inkling_pallas.core.problem import Lengths, Problem
from inkling_pallas.core.safe_lengths import safe_sequences
from inkling_pallas.kernels.mosaic import wgmma_rows
from inkling_pallas.kernels.phases import softmax
from inkling_pallas.kernels.schedule import split_kv, tile_list, tile_list_kernel
from inkling_pallas.kernels.schedule.tiling import RowTiling, Tiling
from inkling_pallas.testing.reference import reference_rel_attention

_LOG2_E = float(np.log2(np.e))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A causal batch as the kernels see it: lengths, window and extent."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    rel_extent: int = 128
    window_left: int | None = None
    group: int = 8
    num_kv_heads: int = 2

    def problem(self) -> Problem:
        """Returns the static description of a call."""
        return Problem(
            num_tokens=sum(self.q_lens),
            num_heads=self.group * self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=64,
            batch_size=len(self.q_lens),
            num_blocks=1 + sum(-(-n // 16) for n in self.kv_lens),
            block_size=16,
            max_blocks=-(-max(self.kv_lens) // 16),
            max_seqlen_q=1 << (max(self.q_lens) - 1).bit_length(),
            softmax_scale=1 / 64,
            causal=True,
            window_left=self.window_left,
            window_right=0,
            rel_extent=self.rel_extent,
            num_splits=None,
            dtype="bfloat16",
            out_dtype="bfloat16",
            return_lse=False,
        )

    def lengths(self) -> Lengths:
        """Returns the arrays of a call."""
        offsets = np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)
        return Lengths(jnp.array(self.kv_lens, jnp.int32), jnp.asarray(offsets), None, None)


class RowBands(NamedTuple):
    """Query rows [row, row + tokens) of one warpgroup, and the KV tiles where its bands start."""

    sequence: int
    row: int
    tokens: int
    bands: tuple[int, ...]  # as in `tile_list.Bands`: window's edge, far, biased, masked, and where they end


def prefill_bands(batch: Batch, *, block_kv: int = 64) -> list[RowBands]:
    """Returns the bands of every warpgroup of a prefill, in the order in which the kernel takes its tiles."""
    tiling = RowTiling(problem=batch.problem(), block_kv=block_kv, num_stages=2, num_ctas=H200.num_sms, interpret=True)
    work = tile_list_kernel.make_worklist(batch.lengths(), tiling, True)
    found = []
    for words in work.items[: int(work.table[4, -1])]:
        tile = tile_list.tile_of(tile_list.Item(*words[: len(tile_list.Item._fields)]), jnp.int32(0), tiling)
        for warpgroup in (0, 1):
            part = tile_list.rows_of(tile, 0, warpgroup, tiling)
            if int(part.tokens) > 0:
                bands = tuple(map(int, tile_list.bands_of(tile, part, tiling)))
                found.append(RowBands(int(part.sequence), int(part.row), int(part.tokens), bands))
    return found


class Gather(NamedTuple):
    """A bias block as it lies in shared memory, where each element of a score tile is read from, and what comes out."""

    first_distance: int  # of the block, a multiple of 8
    block: np.ndarray  # [tokens, width]: rel_logits of one head at ascending distances
    places: np.ndarray  # int[tokens, keys]: columns of the block
    tile: np.ndarray  # [tokens, keys]: keys ascend


def gather_tile(rel_logits: np.ndarray, *, first_pos: int, first_key: int, keys: int) -> Gather:
    """Returns the block of one head's biases that a tile of keys needs, and the tile that the kernel's gather makes.

    Args:
      rel_logits: [tokens, rel_extent] of one head.
      first_pos: position of the first token.
      first_key: of the tile.
      keys: of the tile, a multiple of 8.
    """
    tokens, extent = rel_logits.shape
    first = (first_pos - first_key - (keys - 1)) // 8 * 8
    width = -(-(keys + tokens + 6) // 8) * 8
    distance = first + np.arange(width)
    inside = (distance >= 0) & (distance < extent)
    block = np.where(inside, rel_logits[:, np.clip(distance, 0, extent - 1)], 0.0)
    starts = np.arange(tokens) * width + np.arange(tokens) + first_pos - first_key - first
    tile = wgmma_rows.gather_descending(jnp.asarray(block), jnp.asarray(starts, jnp.int32), keys, interpret=True)
    places = (starts - np.arange(tokens) * width)[:, None] - np.arange(keys)
    return Gather(first, block, places, np.asarray(tile))


class Sheared(NamedTuple):
    """Rows of a bias in the sheared layout, and the key of their block table that each begins at."""

    first_keys: np.ndarray  # int[tokens]
    table: np.ndarray  # [tokens, sheared width]: keys ascend


def shear_table(rel_logits: np.ndarray, *, first_pos: int) -> Sheared:
    """Returns one head's biases as `sheared_layout.shear_rows` writes them.

    Args:
      rel_logits: [tokens, rel_extent] of one head.
      first_pos: position of the first token.
    """
    tokens, extent = rel_logits.shape
    position = first_pos + np.arange(tokens)
    shifts = sheared_layout.shift_of(position, extent)
    table = sheared_layout.shear_rows(jnp.asarray(rel_logits)[:, None], jnp.asarray(shifts, jnp.int32))
    return Sheared(position - (extent - 1) - shifts, np.asarray(table)[:, 0])


class Share(NamedTuple):
    """What one CTA has of one unit, as [begin, end) on the line of work."""

    cta: int
    sequence: int
    head: int
    begin: int
    end: int
    whole: bool  # the whole unit: its result needs no merging


def decode_shares(batch: Batch, *, num_ctas: int = 12, block_kv: int = 64) -> list[Share]:
    """Returns how the decode kernel's CTAs share the tiles of a batch."""
    tiling = Tiling(problem=batch.problem(), block_kv=block_kv, num_stages=2, num_ctas=num_ctas)
    table = split_kv.table_on_host(safe_sequences(tiling.problem, batch.lengths()), tiling)
    found: list[Share] = []

    def add(cta: int, piece: split_kv.Piece) -> None:
        begin, end, base = int(piece.begin), int(piece.end), int(piece.base)
        whole = begin == 0 and end == piece.tiles
        found.append(Share(cta, int(piece.sequence), int(piece.head), base + begin, base + end, whole))

    with jax.disable_jit():
        for cta in range(num_ctas):
            split_kv.for_each_piece(table, jnp.int32(cta), tiling, lambda _, __, piece, cta=cta: add(cta, piece))
    return found


class Merge(NamedTuple):
    """One row's attention over parts of its keys, and what merging the parts gives."""

    weights: np.ndarray  # [parts]: the share of each part in the result
    parts: np.ndarray  # [parts, head_dim]
    merged: np.ndarray  # [head_dim]
    whole: np.ndarray  # [head_dim]: the same row over all keys at once


def merge_row(call: Mapping[str, Any], *, token: int, head: int, num_parts: int) -> Merge:
    """Returns a row merged from parts by the phase that the combine kernel runs; its sequence is the only one.

    Args:
      call: the arguments of `inkling_rel_attention` with one sequence.
      token: the packed row.
      head: the query head.
      num_parts: of the keys, in whole pages.
    """
    pages = np.array_split(np.asarray(call["block_table"])[0], num_parts)
    total, block_size = int(np.asarray(call["cache_seqlens"])[0]), np.asarray(call["key_cache"]).shape[1]
    outs, lses, offset = [], [], 0
    for part in pages:
        here = min(len(part) * block_size, total - offset)
        changes = {"block_table": part[None], "cache_seqlens": np.array([here]), "kv_offset": np.array([offset])}
        changes["total_seqlens"] = np.array([total])
        out, lse = reference_rel_attention(**{**call, **changes}, return_lse=True, tokens=[token])
        outs.append(jnp.asarray(np.asarray(out)[0, head], jnp.float32))
        lses.append(jnp.full_like(outs[-1], float(np.asarray(lse)[0, head]) * _LOG2_E))
        offset += here
    start = softmax.Merged(jnp.zeros_like(outs[0]), jnp.full_like(outs[0], -jnp.inf), jnp.zeros_like(outs[0]))
    merged, lse_log2 = softmax.finish_merge(softmax.merge(start, outs, lses))
    whole = np.asarray(reference_rel_attention(**call, tokens=[token]))[0, head]
    weights = np.array([float(jnp.exp2(lse - lse_log2)[0]) for lse in lses])
    return Merge(weights, np.stack(outs), np.asarray(merged), whole)
