"""The fixed shapes of the soak: batch K of any seed has shape `shape_of(K)`, so that each program compiles once."""

import dataclasses
from typing import Any

_LENGTHS = ("decode", "multi-token", "chunks", "mixed", "windows", "splits", "parts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """All that is static of a batch; lengths, offsets, tables and memory are drawn."""

    name: str
    kind: str
    batch_size: int
    num_tokens: int  # packed rows: less than batch_size * max_seqlen_q, or more, which leaves rows of no sequence
    max_seqlen_q: int  # a power of two
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    block_size: int = 16
    max_blocks: int = 64
    rel_extent: int = 128
    window_size: tuple[int, int] = (-1, -1)
    dtype: str = "bfloat16"
    num_splits: int | None = None
    return_lse: bool = True
    parts: bool = False  # kv_offset and total_seqlens are given
    dirty_out: bool = True  # the result goes into an array that is NaN before

    @property
    def capacity(self) -> int:
        """Keys that a row of the table can hold."""
        return self.max_blocks * self.block_size

    @property
    def num_blocks(self) -> int:
        """Pages of the pool, some of which no table names."""
        return self.batch_size * self.max_blocks + 3

    @property
    def softmax_scale(self) -> float:
        """1 / head_dim as in Inkling; with 64 the larger 1 / 8, which tells keys apart better."""
        return 1.0 / self.head_dim if self.head_dim == 128 else self.head_dim**-0.5

    def statics(self) -> dict[str, Any]:
        """Returns the static arguments of `inkling_rel_attention`."""
        names = ("max_seqlen_q", "softmax_scale", "window_size", "rel_extent", "num_splits", "return_lse")
        return {"causal": True, **{name: getattr(self, name) for name in names}}


def _shape(
    name: str, sizes: tuple[int, int, int], heads: tuple[int, int], pages: tuple[int, int], **more: Any
) -> Shape:
    """Returns a shape from (batch_size, num_tokens, max_seqlen_q), (query, kv) heads and (block_size, max_blocks)."""
    names = ("batch_size", "num_tokens", "max_seqlen_q", "num_heads", "num_kv_heads", "block_size", "max_blocks")
    kind = next(kind for kind in _LENGTHS if kind.startswith(name.split("_")[0]))
    return Shape(name=name, kind=kind, **dict(zip(names, (*sizes, *heads, *pages), strict=True)), **more)


_F16: dict[str, Any] = {"dtype": "float16"}
SHAPES = (
    _shape("decode_8_1_page_16", (8, 9, 1), (8, 1), (16, 128), rel_extent=1024),
    _shape("chunks_8_1_page_16", (2, 200, 128), (8, 1), (16, 64)),
    _shape("windows_decode_8_2", (8, 8, 1), (8, 2), (16, 80), window_size=(127, 0)),
    _shape("mixed_8_1_page_16", (8, 96, 64), (8, 1), (16, 80)),
    _shape("decode_4_4_page_32", (5, 7, 1), (4, 4), (32, 40), return_lse=False),
    _shape("multi_4_heads_8_2", (6, 20, 4), (8, 2), (16, 64), rel_extent=256),
    _shape("splits_3_decode_8_2", (6, 6, 1), (8, 2), (64, 20), num_splits=3, head_dim=64, **_F16),
    _shape("windows_chunks_8_2", (3, 256, 128), (8, 2), (64, 16), window_size=(127, 0), **_F16),
    _shape("parts_decode_8_2", (6, 6, 1), (8, 2), (16, 64), rel_extent=512, parts=True),
    _shape("decode_16_1_page_128", (4, 6, 1), (16, 1), (128, 16), rel_extent=512, num_splits=1),
    _shape("mixed_8_2_window", (8, 160, 128), (8, 2), (32, 32), rel_extent=64, window_size=(255, 0), **_F16),
    _shape("decode_one_page_256", (1, 1, 1), (8, 1), (256, 8), rel_extent=1024, dirty_out=False),
    _shape("windows_decode_16_1", (4, 6, 1), (16, 1), (64, 32), rel_extent=512, window_size=(511, 0), **_F16),
    _shape("multi_8_heads_8_1", (4, 28, 8), (8, 1), (64, 20), window_size=(127, 0), return_lse=False),
    _shape("chunks_16_1_page_128", (4, 100, 32), (16, 1), (128, 10), rel_extent=64, head_dim=64),
    _shape("splits_5_multi_16_1", (3, 26, 8), (16, 1), (16, 96), num_splits=5, head_dim=64, **_F16),
    _shape("mixed_16_1_page_256", (6, 80, 32), (16, 1), (256, 5), rel_extent=512, return_lse=False),
    _shape("decode_8_8_page_8", (4, 4, 1), (8, 8), (8, 100), head_dim=64, **_F16),
    _shape("parts_chunks_8_2", (3, 160, 128), (8, 2), (16, 48), rel_extent=256, parts=True),
    _shape("chunks_2_2_page_64", (2, 256, 512), (2, 2), (64, 16), **_F16),
    _shape("splits_8_mixed_4_1", (5, 60, 32), (4, 1), (16, 128), num_splits=8),
    _shape("parts_multi_8_1_window", (4, 15, 4), (8, 1), (32, 24), window_size=(200, 0), parts=True),
    _shape("mixed_4_4_page_48", (4, 150, 128), (4, 4), (48, 20), dirty_out=False),
)  # fmt: skip
KINDS = tuple(kind for kind in _LENGTHS if any(shape.kind == kind for shape in SHAPES))


def shape_of(index: int) -> Shape:
    """Returns the shape of batch `index`."""
    return SHAPES[index % len(SHAPES)]
