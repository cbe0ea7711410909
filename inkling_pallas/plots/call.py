"""Pictures of a call: its bias table, a row's weights with and without it, its pages, its bands.

They take the arguments of `inkling_rel_attention` as a dict and return a matplotlib Figure, which a notebook shows.
matplotlib comes with the extra `demo` and is imported when first used.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inkling_pallas.core.batch import make_batch
from inkling_pallas.core.paged_cache import PagedKVCache
from inkling_pallas.plots import call_data as data
from inkling_pallas.plots.call_axes import draw_bands, draw_bias_table, draw_pages, draw_row_weights

_STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def plot_bias_table(call: Mapping[str, Any], *, token: int | None = None) -> Any:
    """Returns a Figure of rel_logits of one row: a bias for each head and distance.

    Args:
      call: the arguments of `inkling_rel_attention`.
      token: the packed row; by default the last one of the sequence with the most rows.

    Raises:
      ImportError: without matplotlib.
    """
    with new_figure(8, 3.2) as figure:
        draw_bias_table(figure.add_subplot(), call, _token(call, token))
    return figure


def plot_row_weights(call: Mapping[str, Any], *, token: int | None = None, head: int = 0) -> Any:
    """Returns a Figure of the attention weights of one row and head, with the bias and without it.

    Args:
      call: the arguments of `inkling_rel_attention`.
      token: the packed row; by default the last one of the sequence with the most rows.
      head: the query head.

    Raises:
      ImportError: without matplotlib.
    """
    with new_figure(8, 3.2) as figure:
        draw_row_weights(figure.add_subplot(), call, _token(call, token), head)
    return figure


def plot_pages(call: Mapping[str, Any]) -> Any:
    """Returns a Figure of the pool: which page belongs to which sequence, and which of its blocks it is.

    Args:
      call: the arguments of `inkling_rel_attention`.

    Raises:
      ImportError: without matplotlib.
    """
    with new_figure(8, 3.2) as figure:
        draw_pages(figure.add_subplot(), call)
    return figure


def plot_bands(call: Mapping[str, Any], *, sequence: int | None = None) -> Any:
    """Returns a Figure of what each row of a sequence does with each key: not seen, seen, seen with a bias.

    Args:
      call: the arguments of `inkling_rel_attention`.
      sequence: its place in the batch; by default the one with the most rows.

    Raises:
      ImportError: without matplotlib.
    """
    with new_figure(8, 3.6) as figure:
        chosen = (
            data.sequence_with_row(call, _token(call, None)) if sequence is None else data.sequence_of(call, sequence)
        )
        draw_bands(figure.add_subplot(), call, chosen)
    return figure


def plot_overview(call: Mapping[str, Any], *, token: int | None = None, head: int = 0) -> Any:
    """Returns a Figure of all four pictures.

    Args:
      call: the arguments of `inkling_rel_attention`.
      token: the packed row; by default the last one of the sequence with the most rows.
      head: the query head.

    Raises:
      ImportError: without matplotlib.
    """
    token = _token(call, token)
    with new_figure(13, 8) as figure:
        axes = figure.subplots(2, 2, width_ratios=(1.15, 1))
        draw_bias_table(axes[0, 0], call, token)
        draw_row_weights(axes[1, 0], call, token, head)
        draw_pages(axes[0, 1], call)
        draw_bands(axes[1, 1], call, data.sequence_with_row(call, token))
    return figure


def save_overview(
    path: str | Path, call: Mapping[str, Any] | None = None, *, token: int | None = None, head: int = 0
) -> None:
    """Writes all four pictures into one file.

    Args:
      path: where to; its suffix says the format, such as .png or .svg.
      call: the arguments of `inkling_rel_attention`; `example_call()` by default.
      token: the packed row; by default the last one of the sequence with the most rows.
      head: the query head.

    Raises:
      ImportError: without matplotlib.
      OSError: if the file cannot be written.
      ValueError: for a format that matplotlib does not write.
    """
    plot_overview(example_call() if call is None else call, token=token, head=head).savefig(path, dpi=110)


def example_call() -> dict[str, Any]:
    """Returns a small call whose pictures explain: three sequences on scattered pages, a bias that fades with distance.

    Example:
      >>> import inkling_pallas as ip
      >>> ip.inkling_rel_attention(**example_call()).shape
      (69, 4, 64)
    """
    rng = np.random.default_rng(7)
    heads, head_dim, extent, block_size = 4, 64, 96, 16
    pages = (1 + rng.permutation(27)).tolist()
    tables = [pages[:13], pages[13:17], pages[17:19]]
    batch = make_batch([64, 1, 4], [200, 60, 25], block_size=block_size, block_tables=tables)
    arguments = batch.arguments() | {"cu_seqlens_q": batch.cu_seqlens_q[:4], "block_table": batch.block_table[:3]}
    keys, values = rng.standard_normal((2, 28, block_size, 1, head_dim), np.float32)
    distance = np.arange(extent)
    shapes = [4 * np.exp(-distance / width) - 1.5 * np.exp(-distance / 60) for width in (40, 12, 4)]
    shapes.append(2 * np.cos(distance / 5) * np.exp(-distance / 45))
    bias = np.stack(shapes) + 0.15 * rng.standard_normal((69, heads, extent))
    return arguments | {
        "cache_seqlens": batch.cache_seqlens[:3],
        "q": rng.standard_normal((69, heads, head_dim), np.float32),
        "key_cache": PagedKVCache.separate(keys, values),
        "value_cache": None,
        "softmax_scale": 1 / head_dim,
        "causal": True,
        "window_size": (-1, -1),
        "rel_extent": extent,
        "rel_logits": bias.astype(np.float32),
    }


def move_pages(call: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Returns a call with the pages of its cache in another order, and a block table that follows: the same call.

    Args:
      call: the arguments of `inkling_rel_attention`, with a cache of separate keys and values.
      seed: of the order.
    """
    num_blocks = data.pool_of(call)[0]
    order = np.random.default_rng(seed).permutation(num_blocks)
    place = np.argsort(order).astype(np.int32)
    table = np.asarray(call["block_table"])
    moved = place[np.clip(table, 0, num_blocks - 1)]
    cache = PagedKVCache.separate(*(np.asarray(pages)[order] for pages in call["key_cache"].arrays))
    return dict(call) | {"key_cache": cache, "block_table": np.where(table < 0, table, moved)}


def _token(call: Mapping[str, Any], token: int | None) -> int:
    return data.default_token(call) if token is None else token


@contextlib.contextmanager
def new_figure(
    width: float, height: float, *, style: Mapping[str, Any] | None = None, paper: str = "white"
) -> Iterator[Any]:
    """Yields an empty Figure in the style of the pictures, which knows how to show itself in a notebook.

    Args:
      width: inches.
      height: inches.
      style: matplotlib settings that come on top.
      paper: colour behind the axes.

    Raises:
      ImportError: without matplotlib.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'inkling-pallas[demo]'.") from error

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=110)
            return file.getvalue()

    with rc_context(_STYLE | dict(style or {})):
        yield Picture(figsize=(width, height), layout="constrained", facecolor=paper)
