"""The table of a batch in shared memory, which each kernel makes from the caller's lengths as it starts.

That costs a kernel about 0.1 us; as XLA operations before it, it would be up to three kernels of their own.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.integers import div, rem
from inkling_pallas.core.problem import Lengths, Sequences
from inkling_pallas.core.safe_lengths import Rows, safe_end, safe_sequence
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.schedule.tiling import Tiling

ROWS = 7

# (facts of a sequence) -> (facts as its kernel shall see them, its amount of work)
Work = Callable[[Sequences], tuple[Sequences, jax.Array]]


class Table(NamedTuple):
    """Per-sequence facts as rows of one int32[7, batch].

    Rows 0 to 3 are `Sequences`, row 4 the work up to and with a sequence, row 5 the largest end of packed rows so far,
    row 6 the most work of one sequence so far.
    """

    read: Callable[[int, Any], jax.Array]  # (row, sequence) -> int32

    def at(self, row: int, sequence: Any) -> jax.Array:
        """Returns one word."""
        return self.read(row, sequence)

    def facts(self, sequence: jax.Array) -> Sequences:
        """Returns the facts of a sequence."""
        return Sequences(*(self.at(row, sequence) for row in range(len(Sequences._fields))))

    def work_before(self, sequence: jax.Array) -> jax.Array:
        """Returns the work of the sequences before one."""
        return jnp.where(sequence == 0, 0, self.at(4, jnp.maximum(sequence - 1, 0)))

    def find(self, position: jax.Array, batch_size: int) -> jax.Array:
        """Returns the sequence that holds a position of the work, by bisection; the last one for a position past it."""
        found = jnp.zeros_like(position)
        for bit in reversed(range((batch_size - 1).bit_length())):
            candidate = found + (1 << bit)
            before = self.at(4, jnp.minimum(candidate, batch_size) - 1)
            found = jnp.where((candidate < batch_size) & (before <= position), candidate, found)
        return found


def smem_type(tiling: Tiling, words: int = 0) -> Any:
    """Returns the table as a scratch type, with so many more words: a buffer of their own would take 1 KiB."""
    batch = tiling.problem.batch_size
    return plgpu.SMEM((ROWS + -(-words // batch), batch), jnp.int32)


def word_at(index: jax.Array, words: int, tiling: Tiling) -> tuple[Any, Any]:
    """Returns the row and column of a word after the table."""
    batch = tiling.problem.batch_size
    if batch >= words:
        return ROWS, index
    return ROWS + div(index, batch), rem(index, batch)


def smem_bytes(tiling: Tiling) -> int:
    """Returns what the table takes."""
    return 4 * ROWS * tiling.problem.batch_size


def fill(lengths: Lengths, table_smem: Any, work: Work, tiling: Tiling, *, by_warp: bool = False) -> Table:
    """Makes the table from lengths in global memory. Returns its reader.

    The warpgroup that calls has it complete, or `by_warp` the single warp.
    """
    others = {name: ref for name, ref in lengths._asdict().items() if name != "cu_seqlens_q" and ref is not None}
    mosaic.scan_table(
        [lengths.cu_seqlens_q, *others.values()],
        table_smem,
        end_of=lambda start, end: safe_end(tiling.problem, Rows(start, end)),
        facts_of=functools.partial(_facts, names=tuple(others), work=work, tiling=tiling),
        interpret=tiling.interpret,
    )
    if not by_warp:
        plgpu.commit_smem()
    return reader(table_smem, tiling)


def on_host(sequences: Sequences, work: Work) -> Table:
    """Returns the reader of the table that kernels would make of some sequences."""
    facts, amount = (jax.tree.map(np.asarray, x) for x in work(sequences))
    running = [np.cumsum(amount), np.maximum.accumulate(facts[0] + facts[1]), np.maximum.accumulate(amount)]
    words = np.stack([*facts, *running]).astype(np.int32)
    return Table(lambda row, sequence: jnp.int32(words[row, int(sequence)]))


def _facts(
    start: jax.Array,
    end: jax.Array,
    claimed: jax.Array,
    *others: jax.Array,
    names: tuple[str, ...],
    work: Work,
    tiling: Tiling,
) -> tuple[jax.Array, ...]:
    """Returns rows 0 to 3 of the table and the work of a sequence, element by element."""
    given: dict[str, Any] = dict(zip(names, others, strict=True))
    lengths = Lengths(**{"cu_seqlens_q": None, "kv_offset": None, "total_seqlens": None, **given})
    sequence = safe_sequence(tiling.whole_problem, Rows(start, end), claimed, lengths)
    facts, amount = work(sequence)
    return (*facts, amount)


def reader(table_smem: Any, tiling: Tiling) -> Table:
    """Returns the reader of a table in shared memory."""
    return Table(functools.partial(mosaic.read_word, table_smem, interpret=tiling.interpret))


def keep_taken(sequence: Sequences, tiling: Tiling) -> jax.Array:
    """Returns the rows of a sequence, 0 if another kernel of the call attends them."""
    taken = (sequence.q_len >= tiling.fewest_rows) & (sequence.q_len <= tiling.problem.max_seqlen_q)
    return lax.select(taken, sequence.q_len, jnp.zeros_like(sequence.q_len))
