"""The cases that every backend must pass, by kind.

`full_cases` are for portable in CI and for every backend on a card, `small_cases` for the interpreter and a second jax
version.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from inkling_pallas.testing.cache_cases import small_write_cases, write_cases
from inkling_pallas.testing.cases import DTYPES, POISON_PLACES, Case

_GLOBAL, _LOCAL = (-1, -1), (511, 0)
_MIXED_TRACE = np.random.default_rng(500).integers(1, 601, 500)


def _name(kind: str, *facts: object) -> str:
    return "_".join([kind, *(str(fact).replace(" ", "") for fact in facts)])


def _prefill() -> Iterator[Case]:
    for q_lens, extent in itertools.product([(64, 33, 17), (300, 512, 129)], [128, 1024]):
        yield Case(
            name=_name("full", q_lens[0], f"e{extent}"),
            kind="full prefill",
            q_lens=q_lens,
            kv_lens=q_lens,
            rel_extent=extent,
        )


def _chunked() -> Iterator[Case]:
    kind = "chunked prefill"
    for extent in (128, 1024):
        yield Case(
            name=f"chunk_3_e{extent}", kind=kind, q_lens=(200, 50, 1), kv_lens=(512, 300, 400), rel_extent=extent
        )
    q_lens, kv_lens = (1, 7, 256, 33, 1, 130), (65537, 129, 1024, 517, 8192, 3333)
    for splits in (1, 2, 8):
        yield Case(
            name=f"chunk_6_splits{splits}",
            kind=kind,
            q_lens=q_lens,
            kv_lens=kv_lens,
            rel_extent=1024,
            num_splits=splits,
        )


def _decode() -> Iterator[Case]:
    kind = "decode"
    yield Case(name="decode_3", kind=kind, q_lens=(1, 1, 1), kv_lens=(50, 7, 200))
    for window in (_GLOBAL, (127, 0), (255, 0)):
        yield Case(
            name=_name("decode_2_w", window[0]), kind=kind, q_lens=(1, 1), kv_lens=(512, 333), window_size=window
        )
    for (heads, kv_heads), window in itertools.product([(8, 1), (64, 8), (64, 16)], [_GLOBAL, _LOCAL]):
        yield Case(
            name=_name("decode_4", heads, kv_heads, "w", window[0]),
            kind=kind,
            q_lens=(1,) * 4,
            kv_lens=(2048, 1001, 138, 4096),
            num_heads=heads,
            num_kv_heads=kv_heads,
            window_size=window,
            rel_extent=1024 if window == _GLOBAL else 512,
        )


def _verify() -> Iterator[Case]:
    for q_len, window in itertools.product(range(2, 10), [_GLOBAL, _LOCAL]):
        yield Case(
            name=_name("verify", q_len, "w", window[0]),
            kind="multi-token decode",
            q_lens=(q_len, q_len),
            kv_lens=(517, 4101),
            window_size=window,
            rel_extent=1024 if window == _GLOBAL else 512,
        )


def _mixed(on_card: bool) -> Iterator[Case]:
    for heads, kv_heads in ((64, 8), (64, 16), (8, 1)):
        whole = on_card or heads == 8
        decodes, chunk, keys = (31, 2048, 8192) if whole else (4, 256, 2048)
        shape: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "kind": "mixed"}
        yield Case(
            name=_name("mixed_chunk", heads, kv_heads),
            q_lens=(1,) * decodes + (chunk,),
            kv_lens=(keys,) * (decodes + 1),
            **shape,
        )
        yield Case(
            name=_name("mixed_6", heads, kv_heads),
            q_lens=(517, 1, 1, 33, 1, 128),
            kv_lens=(600, 40, 333, 100, 7, 1200),
            padding_rows=5,
            **shape,
        )
        lengths = tuple(int(n) for n in _MIXED_TRACE)
        yield Case(name=_name("mixed_500", heads, kv_heads), q_lens=(1,) * 500, kv_lens=lengths, **shape)


def _windows() -> Iterator[Case]:
    kind = "window"
    yield Case(
        name="window_255", kind=kind, q_lens=(512, 300), kv_lens=(512, 300), window_size=(255, 0), rel_extent=256
    )
    yield Case(
        name="window_511", kind=kind, q_lens=(1,), kv_lens=(4096,), window_size=_LOCAL, rel_extent=512, num_splits=16
    )
    yield Case(
        name="window_splits",
        kind=kind,
        q_lens=(128,),
        kv_lens=(1536,),
        window_size=_LOCAL,
        rel_extent=512,
        num_splits=5,
    )


def _not_causal() -> Iterator[Case]:
    for window in ((-1, -1), (30, 12), (-1, 9), (20, -1)):
        for q_lens, kv_lens in (((21, 4), (70, 50)), ((5,), (3,))):
            name = _name("not_causal", len(q_lens), "w", *window)
            yield Case(name=name, kind="not causal", q_lens=q_lens, kv_lens=kv_lens, causal=False, window_size=window)
    yield Case(name="causal_right_7", kind="not causal", q_lens=(21, 4), kv_lens=(70, 50), window_size=(-1, 7))


def _extents() -> Iterator[Case]:
    kind = "extent"
    for extent, lengths in ((1024, range(1022, 1027)), (1024, range(2047, 2051)), (128, range(127, 131))):
        kv_lens = tuple(lengths)
        for q_len in (1, 4):
            name = _name("extent", extent, kv_lens[0], "q", q_len)
            yield Case(name=name, kind=kind, q_lens=(q_len,) * len(kv_lens), kv_lens=kv_lens, rel_extent=extent)
    for extent, window in ((8, (4, 0)), (9, (5, 0))):
        yield Case(
            name=f"extent_{extent}", kind=kind, q_lens=(21, 4), kv_lens=(70, 50), rel_extent=extent, window_size=window
        )


def _zero_lengths() -> Iterator[Case]:
    kind = "zero lengths"
    yield Case(name="zero_some", kind=kind, q_lens=(0, 1, 0, 2), kv_lens=(0, 3, 7, 2))
    yield Case(name="zero_keys", kind=kind, q_lens=(1, 4, 2), kv_lens=(0, 0, 0))
    yield Case(name="zero_short", kind=kind, q_lens=(5,), kv_lens=(3,))
    yield Case(name="zero_padding", kind=kind, q_lens=(), kv_lens=(), padding_rows=4, padding_sequences=3)


def _pages() -> Iterator[Case]:
    for page in (1, 8, 16, 32, 48, 64, 128, 256, 784):
        edges = sorted({page - 1, page, page + 1, 127, 128, 129, 2 * page + 1} - {0})
        q_lens = tuple(min(kv_len, 1 + 2 * (i % 2)) for i, kv_len in enumerate(edges))
        yield Case(name=f"page_{page}", kind="pages", q_lens=q_lens, kv_lens=tuple(edges), block_size=page)


def _shapes() -> Iterator[Case]:
    for group in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16):
        shape: dict[str, Any] = {"num_heads": 2 * group, "q_lens": (1, 5, 33), "kv_lens": (300, 77, 160)}
        yield Case(name=f"group_{group}", kind="groups", **shape)
    for head_dim in range(16, 257, 8):
        yield Case(name=f"head_dim_{head_dim}", kind="head_dim", q_lens=(1, 33), kv_lens=(300, 77), head_dim=head_dim)
    for dtype in DTYPES:
        yield Case(name=f"dtype_{dtype}", kind="dtypes", q_lens=(1, 40), kv_lens=(700, 300), dtype=dtype)


def _freed() -> Iterator[Case]:
    for q_len in (1, 7):
        shape: dict[str, Any] = {"window_size": _LOCAL, "rel_extent": 512, "freed_pages": True}
        yield Case(name=f"freed_q{q_len}", kind="pages freed", q_lens=(q_len,) * 3, kv_lens=(4000, 4005, 515), **shape)


def _absent() -> Iterator[Case]:
    for every, page, window in ((3, 16, _GLOBAL), (2, 128, _LOCAL), (1, 16, _LOCAL)):
        shape: dict[str, Any] = {"q_lens": (1, 5, 150, 1), "kv_lens": (700, 300, 700, 2100), "block_size": page}
        name = _name("absent", every, "p", page, "w", window[0])
        yield Case(name=name, kind="page ids", absent=every, window_size=window, rel_extent=512, **shape)
    yield Case(
        name="absent_decode", kind="page ids", absent=3, q_lens=(1,) * 3, kv_lens=(700, 50, 4100), num_kv_heads=1
    )


def _parts() -> Iterator[Case]:
    for parts, window in itertools.product((1, 2, 3), [_GLOBAL, _LOCAL]):
        name = _name("parts", parts, "w", window[0])
        shape: dict[str, Any] = {"kind": "parts", "q_lens": (1, 9, 130), "kv_lens": (1500, 10, 700), "rel_extent": 512}
        yield Case(name=name, window_size=window, parts=parts, **shape)


def _spikes() -> Iterator[Case]:
    distances = (0, 1, 7, 8, 63, 64, 127, 128, 129, 255, 256, 511, 512, 1023)
    for kv_len, distance in itertools.product((1024, 8191, 65535), distances):
        name = _name("spike", kv_len, "d", distance)
        yield Case(
            name=name,
            kind="spike probe",
            q_lens=(1,),
            kv_lens=(kv_len,),
            rel_extent=1024,
            spike=distance,
            block_size=128,
        )


def _poisons() -> Iterator[Case]:
    for place, value in itertools.product(POISON_PLACES, (float("nan"), float("inf"))):
        shape: dict[str, Any] = {
            "q_lens": (1, 20),
            "kv_lens": (700, 300),
            "window_size": (255, 0),
            "rel_extent": 256,
            "padding_rows": 3,
        }
        yield Case(name=_name("poison", place, value), kind="poison", poison=(place,), poison_value=value, **shape)


def full_cases(*, on_card: bool = False) -> tuple[Case, ...]:
    """Returns every case; `on_card` takes the long forms that a CPU would spend minutes on."""
    generators = (
        _prefill, _chunked, _decode, _verify, _windows, _not_causal, _extents, _zero_lengths,
        _pages, _shapes, _freed, _absent, _parts, _spikes, _poisons, write_cases,
    )  # fmt: skip
    cases = [case for generator in generators for case in generator()]
    return (*cases, *_mixed(on_card))


def small_cases() -> tuple[Case, ...]:
    """Returns one or two short cases of each kind: at most 2 sequences, heads (8, 1) or (8, 2), few keys."""
    one: dict[str, Any] = {"q_lens": (1,), "kv_lens": (300,), "num_kv_heads": 1}
    two: dict[str, Any] = {"q_lens": (11, 5), "kv_lens": (200, 75), "window_size": (127, 0)}
    plain: dict[str, Any] = {"q_lens": (11, 5), "kv_lens": (200, 75)}
    return (
        Case(name="small_full", kind="full prefill", q_lens=(40, 17), kv_lens=(40, 17)),
        Case(name="small_chunk", kind="chunked prefill", **plain),
        Case(name="small_decode", kind="decode", num_splits=3, **one),
        Case(name="small_verify", kind="multi-token decode", q_lens=(4, 4), kv_lens=(130, 65)),
        Case(name="small_mixed", kind="mixed", q_lens=(33, 1), kv_lens=(70, 200), padding_rows=3, padding_sequences=1),
        Case(name="small_window", kind="window", num_splits=2, **two),
        Case(name="small_not_causal", kind="not causal", causal=False, **dict(two, window_size=(30, 12))),
        Case(name="small_extent", kind="extent", q_lens=(1, 2), kv_lens=(130, 129)),
        Case(name="small_zero", kind="zero lengths", q_lens=(0, 5), kv_lens=(7, 3)),
        Case(name="small_page_8", kind="pages", block_size=8, **plain),
        Case(name="small_page_48", kind="pages", block_size=48, **plain),
        Case(name="small_group_3", kind="groups", **dict(plain, num_heads=6)),
        Case(name="small_group_4", kind="groups", **dict(one, num_kv_heads=2)),
        Case(name="small_head_dim_64", kind="head_dim", head_dim=64, **one),
        Case(name="small_freed", kind="pages freed", freed_pages=True, **two),
        Case(name="small_absent", kind="page ids", absent=2, **plain),
        Case(name="small_parts", kind="parts", parts=2, **plain),
        Case(name="small_dtype_float16", kind="dtypes", dtype="float16", **plain),
        Case(name="small_spike", kind="spike probe", spike=64, **one),
        Case(name="small_poison_inf", kind="poison", poison_value=float("inf"), **two),
        *small_write_cases(),
    )


def kinds(cases: tuple[Case, ...]) -> tuple[str, ...]:
    """Returns the kinds of some cases, in order."""
    return tuple(dict.fromkeys(case.kind for case in cases))
