"""The options of commands that run a global and a local layer."""

import argparse
from typing import Any

from inkling_pallas.errors import FLOAT_DTYPES
from inkling_pallas.layouts import LAYOUTS
from inkling_pallas.server import Layer


def positive(text: str) -> int:
    """Returns the integer >= 1 that an option holds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1; got {text!r}")
    return int(text)


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
