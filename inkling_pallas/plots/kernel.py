"""Pictures of what the kernels' phases do: bands, the gather of a bias tile, shares of CTAs, merging.

They return a matplotlib Figure, which a notebook shows. matplotlib comes with the extra `demo` and is imported when
first used.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inkling_pallas.core.buckets import bucket_max_seqlen_q
from inkling_pallas.plots import kernel_data as data
from inkling_pallas.plots.call import new_figure

_GREY, _INK = "#6b7280", "#24292f"
# Edge of the window, far, biased, masked and biased.
_BANDS = {
    "window's edge: bias and mask": "#f4b777",
    "far: neither bias nor mask": "#d6dbe3",
    "bias": "#6f9fd8",
    "diagonal: bias and mask": "#1f5fa8",
}
_SEQUENCES = ("#8fbbe8", "#f4b777", "#9fd39b", "#e7a1a1", "#c3b1e1", "#d6c08d")


def plot_prefill_bands(batch: data.Batch, *, block_kv: int = 64) -> Any:
    """Returns a Figure of the KV tiles that each warpgroup's rows visit, coloured by what they need.

    Args:
      batch: lengths, window and extent.
      block_kv: keys of a tile.

    Raises:
      ImportError: without matplotlib.
    """
    found = sorted(data.prefill_bands(batch, block_kv=block_kv), key=lambda part: part.row)
    with new_figure(8, 1.4 + 0.24 * len(found)) as figure:
        axes = figure.add_subplot()
        for place, part in enumerate(found):
            for (begin, end), colour in zip(itertools.pairwise(part.bands), _BANDS.values(), strict=True):
                bars = [(tile * block_kv, block_kv) for tile in range(begin, end)]
                axes.broken_barh(bars, (place - 0.45, 0.9), facecolors=colour, edgecolor="white", lw=1)
        labels = [f"{part.row}..{part.row + part.tokens - 1}" for part in found]
        axes.set_yticks(range(len(found)), labels, fontsize=8)
        axes.set(xlim=(0, max(batch.kv_lens)), xlabel="key", ylabel="packed rows of a warpgroup")
        axes.set_title(f"Bands in tiles of {block_kv} keys")
        axes.invert_yaxis()
        axes.legend(handles=_patches(_BANDS), frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _patches(colours: Mapping[str, str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour, edgecolor=_GREY, label=text) for text, colour in colours.items()]


def plot_gather(gather: data.Gather) -> Any:
    """Returns a Figure of a bias block in shared memory and the tile that is read from it.

    Args:
      gather: from `kernel_data.gather_tile`.

    Raises:
      ImportError: without matplotlib.
    """
    tokens, width = gather.block.shape
    keys = gather.tile.shape[1]
    bound = float(np.abs(gather.block).max()) or 1.0
    colours = {"cmap": "RdBu", "vmin": -bound, "vmax": bound, "aspect": "auto", "interpolation": "nearest"}
    with new_figure(9, 4.2) as figure:
        block, tile = figure.subplots(2, 1)
        first = gather.first_distance
        block.imshow(gather.block, extent=(first - 0.5, first + width - 0.5, tokens - 0.5, -0.5), **colours)
        for token in range(tokens):
            ends = first + gather.places[token, [0, -1]]
            block.annotate(
                "", (ends[1], token), (ends[0], token), arrowprops={"arrowstyle": "->", "color": _INK, "lw": 1.4}
            )
        block.set(xlabel="distance", ylabel="token")
        block.set_title(
            "The block as copied: one aligned start for all tokens; arrows: what each token reads, key by key"
        )
        image = tile.imshow(gather.tile, extent=(-0.5, keys - 0.5, tokens - 0.5, -0.5), **colours)
        tile.set(xlabel="key of the tile", ylabel="token", title="The tile as added to the scores")
        for axes in (block, tile):
            axes.set_yticks(range(tokens))
        figure.colorbar(image, ax=[block, tile], label="bias", pad=0.01)
    return figure


def plot_sheared(rel_logits: np.ndarray, *, first_pos: int, block_kv: int = 64) -> Any:
    """Returns a Figure of plain rows of a bias by distance, and of the same rows sheared, by key.

    Args:
      rel_logits: [tokens, rel_extent] of one head.
      first_pos: position of the first token.
      block_kv: keys of a tile, whose edges are drawn.

    Raises:
      ImportError: without matplotlib.
    """
    rows = data.shear_table(rel_logits, first_pos=first_pos)
    (tokens, extent), width = rel_logits.shape, rows.table.shape[1]
    bound = float(np.abs(rel_logits).max()) or 1.0
    colours = {"cmap": "RdBu", "vmin": -bound, "vmax": bound, "aspect": "auto", "interpolation": "nearest"}
    first, end = int(rows.first_keys.min()), int(rows.first_keys.max()) + width
    with new_figure(9, 2 + 0.45 * tokens) as figure:
        plain, by_key = figure.subplots(2, 1)
        image = plain.imshow(rel_logits, extent=(-0.5, extent - 0.5, tokens - 0.5, -0.5), **colours)
        plain.set(xlabel="distance", title="Plain: a row per token, distances ascend, so keys descend")
        for token, (start, row) in enumerate(zip(rows.first_keys, rows.table, strict=True)):
            edges = (start - 0.5, start + width - 0.5, token + 0.45, token - 0.45)
            by_key.imshow(row[None], extent=edges, **colours)
        for key in range(first // block_kv * block_kv, end + 1, block_kv):
            by_key.axvline(key - 0.5, color=_INK, lw=1, ls=":")
        by_key.set(xlim=(first - 0.5, end - 0.5), ylim=(tokens - 0.5, -0.5), xlabel="key (dotted: edges of tiles)")
        by_key.set_title("Sheared: keys ascend, and every row starts at a multiple of 8")
        for axes in (plain, by_key):
            axes.set(yticks=range(tokens), ylabel="token")
        figure.colorbar(image, ax=[plain, by_key], label="bias", pad=0.01)
    return figure


def plot_shares(batch: data.Batch, *, num_ctas: int = 12, block_kv: int = 64) -> Any:
    """Returns a Figure of the line of KV tiles of a decode batch, with a gap where a unit starts, and its equal shares.

    Args:
      batch: lengths, window and extent.
      num_ctas: that share the line.
      block_kv: keys of a tile.

    Raises:
      ImportError: without matplotlib.
    """
    shares = data.decode_shares(batch, num_ctas=num_ctas, block_kv=block_kv)
    with new_figure(9, 1.5 + 0.26 * num_ctas) as figure:
        axes = figure.add_subplot()
        for share in shares:
            colour = _SEQUENCES[share.sequence % len(_SEQUENCES)]
            bars = [(tile, 1) for tile in range(share.begin, share.end)]
            style = {"facecolors": colour, "edgecolor": "white", "lw": 0.8, "hatch": "" if share.whole else "///"}
            axes.broken_barh(bars, (share.cta - 0.42, 0.84), **style)
        for begin in sorted({min(s.begin for s in shares if key == (s.sequence, s.head)) for key in _units(shares)}):
            axes.axvline(begin, color=_GREY, lw=0.9, ls=":")
        axes.set_yticks(range(num_ctas))
        axes.set(xlabel="position on the line: one sequence and kv head after the other (dotted)", ylabel="CTA")
        axes.set_title("Equal shares; hatched: a part of a unit, for the combine kernel to merge")
        axes.invert_yaxis()
        named = {f"sequence {b}: {n:,} keys": _SEQUENCES[b % len(_SEQUENCES)] for b, n in enumerate(batch.kv_lens[:8])}
        axes.legend(handles=_patches(named), frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _units(shares: Sequence[data.Share]) -> set[tuple[int, int]]:
    return {(share.sequence, share.head) for share in shares}


def plot_buckets(lengths: Sequence[int]) -> Any:
    """Returns a Figure of what a static max_seqlen_q is rounded up to, and how many programs a server meets.

    Args:
      lengths: the longest q_len of each step, in order.

    Raises:
      ImportError: without matplotlib.
    """
    buckets = [bucket_max_seqlen_q(length) for length in lengths]
    with new_figure(9, 3.2) as figure:
        sizes, programs = figure.subplots(1, 2)
        every = np.arange(1, max(lengths) + 1)
        sizes.step(every, [bucket_max_seqlen_q(int(n)) for n in every], where="mid", color=_BANDS["bias"])
        sizes.plot(every, every, color=_GREY, ls=":")
        sizes.set(xlabel="longest q_len", ylabel="max_seqlen_q", title="The bucket; dotted: no rounding")
        for name, values, colour in (("as it is", lengths, "#c2570c"), ("bucket", buckets, "#1f5fa8")):
            seen = [len(set(values[: i + 1])) for i in range(len(values))]
            programs.plot(seen, color=colour, label=f"{name}: {seen[-1]}")
        programs.set(xlabel="step", ylabel="programs compiled so far", title="Programs that a server compiles")
        programs.legend(frameon=False)
    return figure


def plot_merge(merge: data.Merge) -> Any:
    """Returns a Figure of a row's partial results, their weights, and the merged row on the row over all keys.

    Args:
      merge: from `kernel_data.merge_row`.

    Raises:
      ImportError: without matplotlib.
    """
    with new_figure(9, 3.4) as figure:
        weights, rows = figure.subplots(1, 2, width_ratios=(1, 2.4))
        names = [f"part {p}" for p in range(len(merge.weights))]
        weights.barh(names, merge.weights, color=_SEQUENCES[: len(names)])
        weights.invert_yaxis()
        weights.set(xlabel="2^(lse of the part - lse)", title="Weight of each part")
        for part, colour in zip(merge.parts, _SEQUENCES, strict=False):
            rows.plot(part, color=colour, lw=1)
        rows.plot(merge.whole, color=_GREY, lw=4, alpha=0.5, label="over all keys at once")
        rows.plot(merge.merged, color=_INK, lw=1.2, label="merged")
        difference = float(np.abs(merge.merged - merge.whole).max())
        rows.set(xlabel="element of the row", title=f"Partial rows and their merge (differs by {difference:.0e})")
        rows.legend(frameon=False)
    return figure
