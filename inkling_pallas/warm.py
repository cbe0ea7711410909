"""Compiling a server's variants before its first request."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from inkling_pallas.batch import Batch, make_batch
from inkling_pallas.buckets import Buckets, Variant

Progress = Callable[[int, int, Variant], None]


def warmup(step: Callable[[Batch], Any], buckets: Buckets, *, progress: Progress | None = None) -> dict[Variant, float]:
    """Runs a step once for each variant of a server, on batches that are all padding, so that all are compiled.

    Such a batch writes nothing to the cache and attends to nothing. The largest variant comes first: where memory does
    not suffice, that shows at once.

    Args:
      step: takes a Batch and runs the server's own jitted step on it; what it returns is waited for. If the step
        donates its cache, `step` keeps the new one.
      buckets: the sizes that the server pads to.
      progress: called with (done, all, variant) after each one. None shows a bar on stderr, if that is a terminal and
        rich is installed.

    Returns:
      Seconds of each variant.

    Example:
      >>> import inkling_pallas as ip
      >>> limits = dict(max_num_batched_tokens=32, max_num_seqs=8, max_model_len=256, block_size=16)
      >>> len(ip.warmup(lambda batch: batch.slots.sum(), ip.Buckets.for_server(**limits)))
      4
    """
    variants = buckets.variants()[::-1]
    seconds = {}
    with _bar(len(variants)) if progress is None else contextlib.nullcontext(progress) as report:
        for done, variant in enumerate(variants, start=1):
            start = time.perf_counter()
            jax.block_until_ready(step(padding_batch(variant)))
            seconds[variant] = time.perf_counter() - start
            report(done, len(variants), variant)
    return seconds


def padding_batch(variant: Variant) -> Batch:
    """Returns a batch of a variant's sizes without a sequence.

    Args:
      variant: the sizes.
    """
    return make_batch([], [], block_size=1, buckets=Buckets(**{k: (size,) for k, size in variant._asdict().items()}))


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Progress]:
    """Yields what shows progress as a bar on a terminal, and nothing elsewhere."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        yield lambda done, total, variant: None
        return
    console = Console(stderr=True)
    columns = (
        *progress.Progress.get_default_columns()[:2],
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=total)

        def report(done: int, total: int, variant: Variant) -> None:
            sizes = f"{variant.num_tokens} rows of {variant.batch_size} sequences"
            bar.update(task, completed=done, total=total, description=f"compiled {sizes}")

        yield report
