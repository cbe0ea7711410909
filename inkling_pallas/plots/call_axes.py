"""The parts of the pictures: each draws into axes that it is given."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from inkling_pallas.core.sheared_layout import ShearedLogits
from inkling_pallas.plots import call_data as data

_WITH_BIAS, _WITHOUT_BIAS, _GREY = "#1f5fa8", "#d97706", "#6b7280"
_BAND_COLOURS = ("#ffffff", "#d6dbe3", "#6f9fd8")
_OWNER_COLOURS = ("#8fbbe8", "#f4b777", "#9fd39b", "#e7a1a1", "#c3b1e1", "#d6c08d", "#a5d5d8", "#e6b3d3")
_UNUSED = "#eef0f3"
# Past so many, pages are drawn without names and pixels stand for several rows or keys.
_MAX_NAMED_PAGES = 96
_MAX_NAMED_BLOCKS = 16
_MAX_PIXELS = 480


def draw_bias_table(axes: Any, call: Mapping[str, Any], token: int) -> None:
    """Draws rel_logits of a row: heads down, distances across."""
    bias = call["rel_logits"]
    table = np.asarray(bias.plain() if isinstance(bias, ShearedLogits) else bias)[token].astype(np.float64)
    heads, extent = table.shape
    bound = float(np.abs(table).max()) or 1.0
    edges = (-0.5, extent - 0.5, heads - 0.5, -0.5)
    colours = {"cmap": "RdBu", "vmin": -bound, "vmax": bound}
    image = axes.imshow(table, aspect="auto", extent=edges, interpolation="nearest", **colours)
    axes.figure.colorbar(image, ax=axes, label="added to the logit", pad=0.02)
    axes.set_yticks(np.unique(np.linspace(0, heads - 1, min(heads, 8)).astype(int)))
    axes.set(title=f"Bias table of row {token}: rel_logits[{token}]", ylabel="head")
    axes.set_xlabel("distance to the key (0: the row's own)")


def draw_row_weights(axes: Any, call: Mapping[str, Any], token: int, head: int) -> None:
    """Draws the weights of a row and head over distance, with the bias and without."""
    weights = data.row_weights(call, token, head)
    extent = call["rel_extent"]
    axes.set(title=f"Weights of row {token}, head {head}", xlabel="distance to the key", ylabel="weight of a key")
    if not len(weights.dist):
        axes.text(0.5, 0.5, "this row sees no key", transform=axes.transAxes, ha="center", color=_GREY)
        return
    reaches_past = weights.dist.max() >= extent
    cut = extent if reaches_past else max(1, len(weights.dist) // 8)
    near = weights.dist < cut
    for values, colour, name in (
        (weights.without_bias, _WITHOUT_BIAS, "without"),
        (weights.with_bias, _WITH_BIAS, "with"),
    ):
        label = f"{name} the bias: {values[near].sum():.0%} on the keys nearer than {cut:,}"
        axes.plot(*_binned(weights.dist, values), color=colour, lw=1.3, label=label, drawstyle="steps-mid")
    if reaches_past:
        axes.axvline(extent - 0.5, color=_GREY, ls="--", lw=1)
        note = f" rel_extent = {extent:,}: bias 0 from here on"
        axes.text(extent, 0.72, note, transform=axes.get_xaxis_transform(), color=_GREY, fontsize=8.5)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    _legend_below(axes, 0.16)


def _binned(dist: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (distance, mean weight) of runs of keys, few enough to be told apart."""
    runs = np.array_split(np.argsort(dist), min(len(dist), _MAX_PIXELS))
    return np.array([dist[run].mean() for run in runs]), np.array([values[run].mean() for run in runs])


def draw_pages(axes: Any, call: Mapping[str, Any]) -> None:
    """Draws the pool of pages, coloured by sequence."""
    from matplotlib.colors import to_rgb

    owner, block = data.page_owners(call)
    columns = max(1, int(np.ceil(np.sqrt(len(owner) * 2))))
    rows = -(-len(owner) // columns)
    image = np.ones((rows * columns, 3))
    image[: len(owner)] = to_rgb(_UNUSED)
    for page in np.flatnonzero(owner >= 0):
        image[page] = to_rgb(_OWNER_COLOURS[owner[page] % len(_OWNER_COLOURS)])
    axes.imshow(image.reshape(rows, columns, 3), aspect="auto", interpolation="nearest")
    if len(owner) <= _MAX_NAMED_PAGES:
        _name_pages(axes, owner, block, columns)
        axes.text(0, 1.02, "A2 is block 2 of sequence A", transform=axes.transAxes, fontsize=8, color=_GREY)
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"Pool of {len(owner):,} pages of {data.pool_of(call)[1]} keys", pad=18)
    axes.spines[:].set_visible(False)
    _label_owners(axes, call, owner)


def _name_pages(axes: Any, owner: np.ndarray, block: np.ndarray, columns: int) -> None:
    """Writes the id of each page and which block of its sequence it is."""
    for page in range(len(owner)):
        y, x = divmod(page, columns)
        axes.text(x - 0.42, y - 0.42, str(page), fontsize=7, color=_GREY, va="top")
        if owner[page] >= 0:
            axes.text(x, y + 0.08, f"{_letter(owner[page])}{block[page]}", ha="center", va="center", weight="bold")
        axes.add_patch(_outline(x, y))


def _outline(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="white", lw=2)


def _letter(sequence: int) -> str:
    return chr(ord("A") + sequence) if sequence < 26 else f"s{sequence}."


def _label_owners(axes: Any, call: Mapping[str, Any], owner: np.ndarray) -> None:
    """Lists the first sequences below the pool."""
    from matplotlib.patches import Patch

    patches = []
    for b in np.unique(owner[owner >= 0])[:5]:
        sequence = data.sequence_of(call, int(b))
        text = f"sequence {_letter(b)}: {sequence.kv_len:,} keys, {sequence.q_len:,} row{'s' * (sequence.q_len != 1)}"
        patches.append(Patch(color=_OWNER_COLOURS[b % len(_OWNER_COLOURS)], label=text))
    patches.append(Patch(color=_UNUSED, label="no sequence's"))
    _legend_below(axes, 0.02, handles=patches, ncols=2)


def _legend_below(axes: Any, distance: float, **content: Any) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(-0.01, -distance), frameon=False, **content)


def draw_bands(axes: Any, call: Mapping[str, Any], sequence: data.Sequence) -> None:
    """Draws which keys the rows of a sequence see, and with what."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rows, keys = (_samples(n) for n in (sequence.q_len, sequence.kv_len))
    image = data.bands(call, sequence, rows, keys)
    edges = (-0.5, sequence.kv_len - 0.5, sequence.q_len - 0.5, -0.5)
    colours = ListedColormap(_BAND_COLOURS)
    axes.imshow(image, aspect="auto", cmap=colours, vmin=0, vmax=2, extent=edges, interpolation="nearest")
    axes.spines[:].set_visible(True)
    name = _letter(sequence.index)
    axes.set(xlabel="key, in the order of the sequence", ylabel="row")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"Which keys the rows of sequence {name} see", pad=18)
    _mark_blocks(axes, sequence)
    named = zip(_BAND_COLOURS, data.BANDS, strict=True)
    patches = [Patch(facecolor=colour, edgecolor=_GREY, label=text) for colour, text in named]
    _legend_below(axes, 0.16, handles=patches)


def _samples(count: int) -> np.ndarray:
    """Returns indices of [0, count), evenly spread, one for each pixel."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(max(count, 1), _MAX_PIXELS)).astype(np.int64))


def _mark_blocks(axes: Any, sequence: data.Sequence) -> None:
    """Draws where pages meet, and above them their ids, as far as there is room."""
    starts = np.arange(len(sequence.pages)) * sequence.block_size
    if not 0 < len(starts) <= 4 * _MAX_NAMED_BLOCKS:
        return
    for start in starts[1:]:
        axes.axvline(start - 0.5, color=_GREY, lw=0.8, ls=":")
    above = {"transform": axes.get_xaxis_transform(), "fontsize": 8, "color": _GREY}
    if len(starts) > _MAX_NAMED_BLOCKS:
        axes.text(0, 1.02, "dotted: where pages meet", **above)
        return
    axes.text(-0.01, 1.02, "page", **{**above, "transform": axes.transAxes}, ha="right")
    for start, page in zip(starts, sequence.pages, strict=True):
        axes.text(
            (start + min(start + sequence.block_size, sequence.kv_len)) / 2, 1.02, str(page), **above, ha="center"
        )
