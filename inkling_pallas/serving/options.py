"""The command line of serve-sim, and the scheduler and server that it describes.

All requests wait at the start. A step mixes chunks of prompts with decodes under a token budget; window layers give
back pages, and an exhausted pool preempts the newest request, whose keys are computed again. Time counts scheduling,
arrays and the step, not compiling and checking.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inkling_pallas.core.buckets import Buckets
from inkling_pallas.core.cache_layouts import LAYOUTS
from inkling_pallas.core.console import positive
from inkling_pallas.core.errors import FLOAT_DTYPES
from inkling_pallas.serving.layer import Layer
from inkling_pallas.serving.scheduler import Limits, Scheduler
from inkling_pallas.serving.server import AttentionServer, Kind
from inkling_pallas.serving.trace import Request, read_trace


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


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """Adds the shapes of both kinds of layer, the cache's layout, backend and seed to a command line."""
    shapes = {
        "--block-size": (16, "keys of a page"),
        "--head-dim": (128, "head dimension"),
        "--global-heads": (8, "query heads of the global layer on this device"),
        "--global-kv-heads": (1, "its kv heads"),
        "--global-extent": (1024, "its distances with a bias"),
        "--local-heads": (8, "query heads of the local layer on this device"),
        "--local-kv-heads": (2, "its kv heads"),
        "--local-extent": (512, "its distances with a bias; its window is one less"),
    }
    for option, (default, meaning) in shapes.items():
        parser.add_argument(option, type=positive, default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--dtype", choices=FLOAT_DTYPES, default="bfloat16")
    parser.add_argument("--layout", choices=LAYOUTS, default="separate", help="how the cache lies in memory")
    parser.add_argument("--backend", default="auto", help="'auto' or a backend's name")
    parser.add_argument("--seed", type=int, default=0)


def layers_of(options: argparse.Namespace) -> tuple[Layer, Layer]:
    """Returns the global and the local layer that the options describe."""
    names = ("head_dim", "block_size", "dtype", "layout")
    shared: dict[str, Any] = {name: getattr(options, name) for name in names}

    def layer(name: str, window_size: tuple[int, int]) -> Layer:
        heads, kv_heads, extent = (getattr(options, f"{name}_{what}") for what in ("heads", "kv_heads", "extent"))
        shapes = {"num_heads": heads, "num_kv_heads": kv_heads, "rel_extent": extent}
        return Layer(name=name, window_size=window_size, **shapes, **shared)

    return layer("global", (-1, -1)), layer("local", (options.local_extent - 1, 0))
