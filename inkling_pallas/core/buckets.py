"""To which sizes a server pads its batches, and how many compiled variants that leads to."""

import dataclasses
import itertools
from typing import NamedTuple, Self

from inkling_pallas.core.describe import describe
from inkling_pallas.core.errors import refuse, static_int

MOST_SIZE = 2**30  # of a batch in any direction: indices are int32


def bucket_max_seqlen_q(max_seqlen_q: int) -> int:
    """Returns max_seqlen_q rounded up to a power of two, the value that a call is compiled for.

    Args:
      max_seqlen_q: the longest q_len of a batch, a static int >= 0.

    Raises:
      ValueError: if it is traced, negative or no integer.

    Example:
      >>> [bucket_max_seqlen_q(n) for n in range(10)]
      [1, 1, 2, 4, 4, 8, 8, 8, 8, 16]
    """
    return 1 << max(0, static_int("max_seqlen_q", max_seqlen_q, 0) - 1).bit_length()


class Variant(NamedTuple):
    """The static sizes of a step: a step is compiled once for each."""

    num_tokens: int
    batch_size: int
    max_seqlen_q: int
    max_blocks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The sizes that batches are padded to: rising ladders, of which a batch takes the first entry that holds it.

    Attributes:
      num_tokens: packed rows.
      batch_size: sequences.
      max_seqlen_q: rows of the longest sequence, powers of two.
      max_blocks: pages of the longest sequence, the width of block_table.
    """

    num_tokens: tuple[int, ...]
    batch_size: tuple[int, ...]
    max_seqlen_q: tuple[int, ...]
    max_blocks: tuple[int, ...]

    @classmethod
    def for_server(cls, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int) -> Self:
        """Returns the ladders for a server's limits, named as vLLM names them.

        Tokens double from 16, as their number is what a step costs. Sequences go up by 4 from 8, and rows of the
        longest are 1 (decode), 16 (verifying drafted tokens) or the most there can be (prefill): those cost little
        when padded. The table has the width that the longest sequence needs.

        Args:
          max_num_batched_tokens: rows of a step, at most.
          max_num_seqs: sequences of a step, at most.
          max_model_len: keys of a sequence, at most.
          block_size: tokens of a page.

        Raises:
          ValueError: if one is no int >= 1.

        Example:
          >>> import inkling_pallas as ip
          >>> limits = dict(max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=32768, block_size=64)
          >>> buckets = ip.Buckets.for_server(**limits)
          >>> buckets.num_tokens
          (16, 32, 64, 128, 256, 512, 1024, 2048)
          >>> buckets.batch_size, buckets.max_seqlen_q, buckets.max_blocks
          ((8, 32, 64), (1, 16, 2048), (512,))
          >>> len(buckets.variants())
          39
        """
        tokens = static_int("max_num_batched_tokens", max_num_batched_tokens, 1)
        keys = static_int("max_model_len", max_model_len, 1)
        rows = bucket_max_seqlen_q(tokens)
        return cls(
            num_tokens=_ladder(16, 2, tokens),
            batch_size=_ladder(8, 4, static_int("max_num_seqs", max_num_seqs, 1)),
            max_seqlen_q=tuple(sorted({min(1, rows), min(16, rows), rows})),
            max_blocks=(-(-keys // static_int("block_size", block_size, 1)),),
        )

    def __post_init__(self) -> None:
        rule, advice = "be a rising tuple of ints >= 1", "A batch takes the first that holds it."
        for name in Variant._fields:
            ladder = getattr(self, name)
            if not isinstance(ladder, tuple) or not ladder:
                raise refuse(name, rule, describe(ladder), advice)
            sizes = [static_int(f"{name}[{i}]", size, 1, MOST_SIZE) for i, size in enumerate(ladder)]
            if sizes != sorted(set(sizes)):
                raise refuse(name, rule, describe(ladder), advice)
        if any(bucket_max_seqlen_q(n) != n for n in self.max_seqlen_q):
            raise refuse("max_seqlen_q", "hold powers of two", self.max_seqlen_q, "A call rounds it up to one.")

    def fit(self, needed: Variant) -> Variant:
        """Returns the variant that a batch of these sizes is padded to.

        Args:
          needed: sizes of the batch; 0 counts as 1.

        Raises:
          ValueError: if a size is over the last entry of its ladder.
        """
        return Variant(*(_fit(name, getattr(self, name), size) for name, size in needed._asdict().items()))

    def variants(self) -> tuple[Variant, ...]:
        """Returns every variant that a batch can need whose sequences all have a row, smallest first.

        b sequences of which the longest has m rows have m + b - 1 to b * m rows in all, which rules out most triples.
        """
        steps = [_with_lower_bound(getattr(self, name)) for name in ("num_tokens", "batch_size", "max_seqlen_q")]
        reachable = [
            (tokens, batch, rows)
            for (tokens_over, tokens), (batch_over, batch), (rows_over, rows) in itertools.product(*steps)
            if batch_over + rows_over + 1 <= tokens and batch * rows > tokens_over
        ]
        return tuple(Variant(*sizes, width) for sizes in reachable for width in self.max_blocks)


def _ladder(first: int, factor: int, last: int) -> tuple[int, ...]:
    """Returns first, first * factor, ... and last, which need not be in step."""
    steps = itertools.takewhile(lambda n: n < last, (first * factor**i for i in itertools.count()))
    return (*steps, last)


def _with_lower_bound(ladder: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns (over, up_to) of each entry: it holds the sizes from over + 1 to up_to."""
    return list(itertools.pairwise((0, *ladder)))


def _fit(name: str, ladder: tuple[int, ...], size: int) -> int:
    entry = next((entry for entry in ladder if entry >= size), None)
    if entry is None:
        advice = "Schedule less in a step."
        if name == "max_blocks":
            advice = "A sequence is longer than max_model_len: end it there, or make Buckets for longer ones."
        raise refuse(f"{name} of a batch", f"be at most {ladder[-1]}, the last bucket", size, advice)
    return entry
