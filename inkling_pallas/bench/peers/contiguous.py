"""A workload as libraries want it: calls over contiguous keys and values, laid out before anything is timed."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.testing.cases import Case

# Up to so many rows of a sequence are folded with the heads of a group: libraries waste most of a tile on fewer rows.
FEW_ROWS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Sequences that one call computes, each with its last `keys` keys (those before are outside the window)."""

    sequences: tuple[int, ...]
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    folded: bool = False  # q is [batch, rows * group, num_kv_heads, head_dim], and every row sees every key

    @property
    def offset(self) -> int:
        """Position of the first row, counted from the first key that is there."""
        return self.keys[0] - self.rows[0]


def parts_of(case: Case, *, together: bool) -> list[Part]:
    """Returns the calls that make up a workload.

    Sequences with few rows go into one call for each length (rounded up to a power of two). Those whose rows are all of
    their keys go into one padded call if `together`, else into a call each, as all others do.
    """
    few: dict[tuple[int, int], list[int]] = {}
    prompts, others = [], []
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        if q_len <= FEW_ROWS and q_len < kv_len:
            few.setdefault((q_len, (_keys(case, b) - 1).bit_length()), []).append(b)
        else:
            (prompts if together and q_len == kv_len else others).append(b)
    parts = [_part(case, group, folded=True) for group in few.values()]
    return parts + ([_part(case, prompts)] if prompts else []) + [_part(case, [b]) for b in others]


def _part(case: Case, sequences: Sequence[int], *, folded: bool = False) -> Part:
    rows = tuple(case.q_lens[b] for b in sequences)
    return Part(sequences=tuple(sequences), rows=rows, keys=tuple(_keys(case, b) for b in sequences), folded=folded)


def _keys(case: Case, b: int) -> int:
    """Returns how many of a sequence's last keys its rows may see; a prompt keeps all, so that no call is padded."""
    window = case.window_size[0]
    return case.kv_lens[b] if window < 0 else min(case.kv_lens[b], case.q_lens[b] + window)


def contiguous(case: Case, arguments: Mapping[str, Any], part: Part) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (q, k, v) of a part, padded to its longest sequence: [batch, rows or keys, heads, head_dim]."""
    sequences = list(part.sequences)
    pages = np.asarray(arguments["block_table"])[sequences]
    kv_lens = np.array(case.kv_lens)[sequences]
    key = np.minimum((kv_lens - part.keys)[:, None] + np.arange(max(part.keys)), kv_lens[:, None] - 1)
    page = np.take_along_axis(pages, key // case.block_size, axis=1)
    k, v = (arguments[name][page, key % case.block_size] for name in ("key_cache", "value_cache"))
    row = _starts(case)[sequences][:, None] + np.arange(max(part.rows))
    q = arguments["q"][np.minimum(row, case.num_tokens - 1)]
    if part.folded:
        grouped = q.reshape(*row.shape, case.num_kv_heads, -1, case.head_dim)
        q = grouped.swapaxes(2, 3).reshape(len(sequences), -1, case.num_kv_heads, case.head_dim)
    return q, k, v


def packed_rows(case: Case, parts: Sequence[Part], outputs: Sequence[jax.Array]) -> jax.Array:
    """Returns the results of the parts, each shaped as its q, as [num_tokens, num_heads, head_dim]."""
    packed = jnp.zeros((case.num_tokens, case.num_heads, case.head_dim), outputs[0].dtype)
    for part, output in zip(parts, outputs, strict=True):
        for first, rows in _rows_of(case, part, output):
            packed = packed.at[first : first + len(rows)].set(rows)
    return packed


def _rows_of(case: Case, part: Part, output: jax.Array) -> Iterator[tuple[int, jax.Array]]:
    if part.folded:
        grouped = output.reshape(len(output), part.rows[0], -1, case.num_kv_heads, case.head_dim)
        output = grouped.swapaxes(2, 3).reshape(len(output), part.rows[0], case.num_heads, case.head_dim)
    for b, count, rows in zip(part.sequences, part.rows, output, strict=True):
        yield int(_starts(case)[b]), rows[:count]


def _starts(case: Case) -> np.ndarray:
    return np.cumsum((0, *case.q_lens))
