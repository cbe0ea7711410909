"""The command line of serve-sim, and the scheduler and server that it describes.

All requests wait at the start. A step mixes chunks of prompts with decodes under a token budget; window layers give
back pages, and an exhausted pool preempts the newest request, whose keys are computed again. Time counts scheduling,
arrays and the step, not compiling and checking.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from inkling_pallas.buckets import Buckets
from inkling_pallas.layer_options import add_layer_options, layers_of, positive
from inkling_pallas.scheduler import Limits, Scheduler
from inkling_pallas.serving import AttentionServer, Kind
from inkling_pallas.trace import Request, read_trace


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(
        prog="python -m inkling_pallas serve-sim", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("--trace", type=Path, help="CSV with ContextTokens, GeneratedTokens (default: one is shipped)")
    counts = {
        "--requests": (24, "requests taken from the trace, its first ones"),
        "--shrink": (1, "divide the trace's lengths by this, for a small machine"),
        "--token-budget": (512, "rows of a step"),
        "--chunk": (256, "rows of one request in a step"),
        "--max-seqs": (16, "requests of a step"),
        "--global-layers": (1, "global layers"),
        "--local-layers": (1, "local layers"),
        "--check-every": (10, "check every so many steps, and the last one"),
    }
    for option, (default, meaning) in counts.items():
        p.add_argument(option, type=positive, default=default, help=f"{meaning} (default {default})")
    p.add_argument("--max-model-len", type=positive, help="tokens of a request (default: those of the longest)")
    p.add_argument("--global-pages", type=positive, help="pages of a global layer (default: half of what can be used)")
    p.add_argument("--local-pages", type=positive, help="pages of a local layer (default: all that can be used)")
    p.add_argument("--check-rows", type=count, default=32, help="rows checked in such a step, 0 for all (default 32)")
    p.add_argument("--out", type=Path, metavar="FOLDER", help="also write a JSON file")
    add_layer_options(p)
    return p


def count(text: str) -> int:
    """Returns the integer >= 0 that an option holds."""
    return 0 if text == "0" else positive(text)


def build(options: argparse.Namespace) -> tuple[Scheduler, AttentionServer]:
    """Returns the scheduler with all requests waiting, and the server, nothing compiled yet."""
    requests = shrunk(read_trace(options.trace)[: options.requests], options.shrink)
    longest = max(request.context + request.generated for request in requests)
    limits = Limits(
        token_budget=options.token_budget,
        chunk=options.chunk,
        max_seqs=options.max_seqs,
        max_model_len=options.max_model_len or longest,
    )
    kinds = kinds_of(options, longest)
    scheduler = Scheduler(requests, {kind.name: kind.page_pool() for kind in kinds}, limits)
    buckets = Buckets.for_server(
        max_num_batched_tokens=limits.token_budget,
        max_num_seqs=limits.max_seqs,
        max_model_len=limits.max_model_len,
        block_size=options.block_size,
    )
    return scheduler, AttentionServer(kinds, buckets, seed=options.seed, backend=options.backend)


def shrunk(requests: Sequence[Request], factor: int) -> list[Request]:
    """Returns requests with their lengths divided, a prompt of one token at least."""
    return [
        Request(context=max(1, request.context // factor), generated=request.generated // factor)
        for request in requests
    ]


def kinds_of(options: argparse.Namespace, longest: int) -> tuple[Kind, ...]:
    """Returns the kinds of layers, with pages for the longest request at least where none are given."""
    kinds = []
    for layer, share in zip(layers_of(options), (2, 1), strict=True):
        one = Kind(layer=layer, layers=1, num_pages=1).page_pool().most_pages(longest, options.chunk)
        pages = getattr(options, f"{layer.name}_pages") or max(one, options.max_seqs * one // share)
        kinds.append(Kind(layer=layer, layers=getattr(options, f"{layer.name}_layers"), num_pages=pages))
    return tuple(kinds)
