"""Compiling a server's variants before its first request."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax

from inkling_pallas.core import console
from inkling_pallas.core.batch import Batch, make_batch
from inkling_pallas.core.buckets import Buckets, Variant

Progress = Callable[[int, int, Variant], None]


def warmup(step: Callable[[Batch], Any], buckets: Buckets, *, progress: Progress | None = None) -> dict[Variant, float]:
    """Runs a step once for each variant of a server, on batches that are all padding, so that all are compiled.

    Such a batch writes nothing to the cache and attends to nothing. The largest variant comes first: where memory does
    not suffice, that shows at once.

    Args:
      step: takes a Batch and runs the server's own jitted step on it; what it returns is waited for. If the step
        donates its cache, `step` keeps the new one.
      buckets: the sizes that the server pads to.
      progress: called with (done, all, variant) after each one. None prints it: a bar where rich is installed,
        else lines.

    Returns:
      Seconds of each variant.

    Example:
      >>> import inkling_pallas as ip
      >>> limits = dict(max_num_batched_tokens=32, max_num_seqs=8, max_model_len=256, block_size=16)
      >>> buckets = ip.Buckets.for_server(**limits)
      >>> seconds = ip.warmup(lambda batch: batch.slots.sum(), buckets, progress=lambda done, all, variant: None)
      >>> len(seconds)
      4
    """
    variants = buckets.variants()[::-1]
    seconds = {}
    with console.progress("compiling", len(variants)) if progress is None else contextlib.nullcontext() as show:
        for done, variant in enumerate(variants, start=1):
            if show is not None:
                show(f"{variant.num_tokens} rows, {variant.batch_size} sequences")
            start = time.perf_counter()
            jax.block_until_ready(step(padding_batch(variant)))
            seconds[variant] = time.perf_counter() - start
            if progress is not None:
                progress(done, len(variants), variant)
    return seconds


def padding_batch(variant: Variant) -> Batch:
    """Returns a batch of a variant's sizes without a sequence.

    Args:
      variant: the sizes.
    """
    return make_batch([], [], block_size=1, buckets=Buckets(**{k: (size,) for k, size in variant._asdict().items()}))
