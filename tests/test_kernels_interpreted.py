"""The attention kernels in the GPU interpreter, race detector on, against the float64 oracle."""

import dataclasses
from typing import Any, NamedTuple

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import LIMITS
from sheared_calls import shear_call

import inkling_pallas as ip
from inkling_pallas.core import dispatch
from inkling_pallas.core.checked_call import check_call
from inkling_pallas.kernels import blackwell, hopper
from inkling_pallas.kernels.phases import bias, pages
from inkling_pallas.testing import assert_rows_close, row_errors
from inkling_pallas.testing.cache_cases import before_write
from inkling_pallas.testing.cases import Case, build
from inkling_pallas.testing.reference import reference_rel_attention

# The interpreter multiplies tiles with NumPy, which warns of the infinities that masks remove.
pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]


class Kernel(NamedTuple):
    """A kernel, with a config of few CTAs."""

    module: Any
    config: Any

    def but(self, **changes: Any) -> "Kernel":
        return self._replace(config=dataclasses.replace(self.config, **changes))

    def compile(self, call: dict[str, Any], **overrides: Any) -> Any:
        return interpreted.compiled(call, self.config, kernel=self.module, **overrides)


DECODE = Kernel(hopper, hopper.Config(block_kv=64, num_stages=2, num_ctas=3))
PREFILL = Kernel(hopper, hopper.Config(block_kv=64, num_stages=2, num_ctas=2, program="prefill"))
RING, AHEAD = PREFILL.but(block_kv=128, overlap=True), PREFILL.but(overlap=True)
TILES = Kernel(blackwell, blackwell.Config(num_stages=2, num_ctas=2))
SPLITS = TILES.but(splits=True, num_ctas=3)


def small(q_lens, kv_lens, **facts):
    own: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 1, "rel_extent": 128, "block_size": 16}
    return Case(name="small", kind="interpreter", q_lens=q_lens, kv_lens=kv_lens, **own | facts)


def cases_of(contents: Any, **facts: Any) -> list[Case]:
    """Returns the cases of a program; contents are (q_lens, kv_lens), or those and more of what arrays hold."""
    return [small(q_lens, kv_lens, **facts, **dict(*more)) for q_lens, kv_lens, *more in contents]


def program(name, kernel, *contents, sheared=False, **facts):
    return pytest.param(kernel, cases_of(contents, **facts), sheared, id=name)


FREED: dict[str, Any] = {"freed_pages": True}
ABSENT: dict[str, Any] = {"absent": 2}
SHORT: dict[str, Any] = {"rel_extent": 8, "block_size": 8, "window_size": (4, 0)}
NOTHING = ((0, 1, 0, 2), (0, 3, 7, 2), {"padding_rows": 3})
NO_KEYS = ((1, 2), (0, 0), {"padding_rows": 2})
INFINITE: dict[str, Any] = {"poison_value": float("inf")}
HALF: dict[str, Any] = {"head_dim": 64, "dtype": "float16", "rel_extent": 64}

OF_DECODE = [
    program("splits, packed", DECODE, ((1, 1), (300, 40)), num_splits=3, num_kv_heads=2, layout="packed"),
    program(
        "no split, interleaved",
        DECODE,
        ((1, 1), (200, 75), ABSENT),
        num_splits=1,
        num_kv_heads=2,
        layout="interleaved",
    ),
    program("rows", DECODE, ((5, 3), (150, 75), FREED), ((5,), (3,)), window_size=(63, 0), num_splits=3),
    program("empty", DECODE, NOTHING, **SHORT),
    program("group 1, page 784", DECODE, ((3,), (300,)), ((3,), (130,)), num_heads=1, block_size=784),
    program(
        "group 4, tiles of 128 keys, window",
        DECODE.but(block_kv=128),
        ((4, 1), (150, 20)),
        ((2,), (300,)),
        ((1, 1), (300, 75)),
        num_heads=4,
        window_size=(100, 0),
    ),
    program("group 16", DECODE, ((8,), (100,)), ((5,), (3,)), num_heads=16, rel_extent=64),
    program("head_dim 64, float16", DECODE, ((1, 1), (130, 65)), **HALF),
    program("head_dim 256, page 48", DECODE, ((1,), (130,)), head_dim=256, block_size=48, rel_extent=64),
    program("group 3, odd extent, sheared", DECODE, ((1, 2), (130, 70)), num_heads=3, rel_extent=20, sheared=True),
    program(
        "clusters of 4, window",
        DECODE.but(num_ctas=8, cluster_size=4),
        ((1, 1), (300, 75)),
        ((1,), (300,), FREED),
        window_size=(127, 0),
    ),
    program("clusters of 2, empty", DECODE.but(num_ctas=8, cluster_size=2), NOTHING, **SHORT),
    program(
        "clusters of 2, group 3",
        DECODE.but(num_ctas=4, cluster_size=2),
        ((2, 1), (130, 65)),
        NO_KEYS,
        num_heads=3,
        rel_extent=64,
    ),
]
WIDE: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 2}
OF_PREFILL = [
    program("packed", PREFILL, ((33,), (33,)), ((17,), (70,)), layout="packed", **WIDE),
    program("interleaved, page 48", PREFILL, ((17,), (130,)), layout="interleaved", block_size=48, **WIDE),
    program("window", PREFILL, ((20, 3), (300, 75)), ((4,), (300,), ABSENT), window_size=(127, 0)),
    program(
        "window past the extent",
        PREFILL,
        ((18,), (200,)),
        NOTHING,
        rel_extent=8,
        block_size=8,
        window_size=(127, 0),
    ),
    # The last keys of the first are in the first page of a tile; keys that left the window may be NaN in a page in use.
    program("ring, short window", RING, ((20,), (157,)), ((30,), (75,)), rel_extent=8, window_size=(4, 0)),
    program("ring, group 4, window", RING, ((33, 1), (150, 20)), ((20,), (400,)), num_heads=4, window_size=(100, 0)),
    program(
        "ring, group 16, page 64",
        RING,
        ((9,), (100,)),
        ((20, 5), (300, 75)),
        num_heads=16,
        rel_extent=64,
        block_size=64,
    ),
    program("ring, head_dim 64, float16", RING, ((20, 1), (130, 65)), **HALF),
    program("group 1, page 784", PREFILL, ((70,), (130,)), ((17,), (300,)), num_heads=1, block_size=784),
    program("ahead, group 3", AHEAD, ((33, 2), (130, 65)), ((20, 5), (300, 75), ABSENT), num_heads=3, rel_extent=64),
    program(
        "mixed, both kernels",
        PREFILL.but(few_rows=DECODE.but(num_ctas=2).config),
        ((1, 20, 3, 0, 1), (130, 90, 40, 8, 70), {"padding_rows": 3}),
    ),
    program("ring, clusters", RING.but(num_ctas=4, cluster_size=2), ((37, 2), (90, 70))),
    program(
        "sheared", PREFILL.but(num_ctas=1), ((19,), (90,)), num_heads=6, num_kv_heads=2, rel_extent=40, sheared=True
    ),
]
# Each kind of the catalogue that the kernel takes, but for those of the tests after this one.
OF_BLACKWELL = [
    program(
        "full and chunked prefill",
        TILES,
        ((17, 1, 20), (17, 130, 70), {"padding_rows": 2, "padding_sequences": 1}),
        ((18, 5), (170, 40), ABSENT),
        rel_extent=64,
        sheared=True,
    ),
    program(
        "window, dtypes, head_dim",
        TILES.but(band_slots=2, block_kv=128),
        ((20, 1), (160, 65)),
        window_size=(60, 0),
        num_heads=4,
        sheared=True,
        **HALF,
    ),
    program(
        "groups, pages, extent, packed",
        TILES,
        ((33, 2), (90, 30)),
        num_heads=6,
        num_kv_heads=2,
        rel_extent=20,
        block_size=48,
        layout="packed",
        sheared=True,
    ),
    program(
        "multi-token decode",
        SPLITS,
        ((5, 3), (150, 75), FREED),
        window_size=(60, 0),
        num_splits=3,
        sheared=True,
    ),
    program(
        "write_kv, no split",
        SPLITS,
        ((1, 1), (100, 0), {"write": True}),
        num_kv_heads=2,
        num_splits=1,
        layout="interleaved",
        sheared=True,
    ),
]
PROGRAMS = {"decode": OF_DECODE, "prefill": OF_PREFILL, "blackwell": OF_BLACKWELL}


@pytest.mark.parametrize(
    ("kernel", "cases", "sheared"),
    [pytest.param(*p.values, id=f"{of}: {p.id}") for of, programs in PROGRAMS.items() for p in programs],
)
def test_matches_the_oracle_without_a_race(kernel, cases, sheared, capfd):
    assert_right(kernel, cases, sheared, capfd)


def assert_right(kernel, cases, sheared, capfd):
    """Compiles one program for all cases, judges each, and returns the program."""
    calls = interpreted.alike([build(case) for case in cases])
    given = [as_given(case, call, sheared) for case, call in zip(cases, calls, strict=True)]
    run = kernel.compile(given[0])
    for case, call, arguments in zip(cases, calls, given, strict=True):
        with interpreted.told(case=case):
            interpreted.assert_right(run(arguments), call, capfd, LIMITS[case.dtype])
    return run


def as_given(case, call, sheared):
    if case.write:
        call = dict(call, key_cache=jax.jit(ip.write_kv)(*before_write(case)))
    return shear_call(call) if sheared else call


TWO = ((1, 2), (250, 70))
ROBUST = {
    "decode": (DECODE.but(num_ctas=5), [TWO, NO_KEYS, ((1, 2), (130, 40), INFINITE)], {}),
    "prefill": (PREFILL.but(num_ctas=5), [((18, 9), (90, 70)), NO_KEYS, ((20,), (5,))], {}),
    "blackwell": (
        SPLITS,
        [((1, 2), (200, 40), facts) for facts in (INFINITE, ABSENT)] + [((1, 2), (129, 0))],
        {"rel_extent": 64},
    ),
}


@pytest.mark.parametrize("name", ROBUST)
def test_one_program_is_right_whatever_the_lengths_and_bad_arrays_spoil_only_their_sequence(name, capfd):
    kernel, contents, facts = ROBUST[name]
    cases, sheared = cases_of(contents, **facts), name == "blackwell"
    run = assert_right(kernel, cases, sheared, capfd)
    call = interpreted.alike([build(case) for case in cases])[0]
    first = cases[0].q_lens[0]
    expected = np.asarray(reference_rel_attention(**call))[first:]
    spoiled = {"block_table": call["block_table"].copy(), "cu_seqlens_q": call["cu_seqlens_q"].copy()}
    spoiled["block_table"][0] = np.resize([2**30, -5, 2**31 - 1], spoiled["block_table"].shape[1])
    spoiled["cu_seqlens_q"][0] = 2
    for array, value in spoiled.items():
        given = {**call, array: value}
        with interpreted.told(spoiled=array):
            out, _ = run(shear_call(given) if sheared else given)
            assert_rows_close(out[first:], expected, limit=LIMITS["bfloat16"])


PARTS: dict[str, Any] = {"kv_offset": np.array([0, 40, 500], np.int32), "window_size": (63, 0)}
PARTS["total_seqlens"] = np.array([1000, 104, 530], np.int32)
STEP: dict[str, Any] = {"kv_offset": np.array([13], np.int32), "total_seqlens": np.array([88], np.int32)}
FAR = {
    "decode": (DECODE, small((1, 2, 1), (100, 64, 30)), PARTS),
    "prefill": (PREFILL, small((2, 9, 3), (100, 64, 30)), PARTS),
    "blackwell": (SPLITS, small((1, 2, 1), (100, 64, 30)), PARTS),
    "decode, sheared, across a step": (
        DECODE.but(num_ctas=2),
        small((5,), (70,), rel_extent=64, window_size=(60, 0), padding_rows=1, poison=("padding_rows",)),
        STEP,
    ),
}


@pytest.mark.parametrize("name", FAR)
def test_parts_with_rows_far_past_or_before_their_keys_are_right(name, capfd):
    kernel, case, facts = FAR[name]
    call = build(case) | facts
    call = call if name.startswith("prefill") else interpreted.without_nan(call)
    given = shear_call(call) if "sheared" in name else call  # Blackwell shears a plain table itself.
    interpreted.assert_right(kernel.compile(given)(given), call, capfd, LIMITS["bfloat16"])


GAP: dict[str, Any] = {"padding_rows": 2, "poison": ("page_zero", "unused_pages", "page_tails")}
OUT = {
    "decode": (DECODE.but(num_ctas=1), [((0, 2), (7, 250), GAP), TWO], False),
    "prefill": (PREFILL.but(num_ctas=1), [((0, 18), (7, 90), GAP), ((18, 9), (90, 70))], False),
    "blackwell": (TILES, [((0, 9), (7, 70), GAP)], True),
}


@pytest.mark.parametrize("name", OUT)
def test_writes_every_row_of_the_float32_array_given_as_out(name):
    kernel, contents, sheared = OUT[name]
    how: dict[str, Any] = {"out_dtype": "float32", "return_lse": False}
    first, *others = interpreted.alike([build(case) for case in cases_of(contents)])
    # Row 0 is then nobody's, before an empty sequence.
    moved = {**first, "cu_seqlens_q": first["cu_seqlens_q"] + 1}
    run = None
    for call in (first, moved, *others):
        given = dict(shear_call(call) if sheared else call, out=interpreted.nothing_written(call))
        run = run or kernel.compile(given, **how)
        with interpreted.told(rows=call["cu_seqlens_q"].tolist()):
            out, lse = run(given, **how)
            assert lse is None
            assert out.dtype == np.float32
            assert_rows_close(out, reference_rel_attention(**call), limit=LIMITS["bfloat16"])


def one_step_on(*arguments):
    return START(*arguments) + 8


def shifted(position, extent):
    return SHIFT(position + 8 - 1, extent)


def all_present(notes, place, tiling):
    return jnp.int32(0)


START, SHIFT = bias._start, bias.shift_of
BROKEN = {
    "decode, bias": (DECODE, bias, "_start", one_step_on, small((1,), (40,), rel_extent=64)),
    "decode, page ids": (DECODE, pages, "absent_chunks", all_present, small((1,), (40,), rel_extent=64, absent=2)),
    "blackwell, bias": (TILES, bias, "shift_of", shifted, small((3,), (40,), rel_extent=64)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_bias_one_step_off_and_keys_of_no_page_are_red(name, monkeypatch):
    kernel, module, function, broken, case = BROKEN[name]
    call = build(case)
    given = shear_call(call)
    monkeypatch.setattr(module, function, broken)
    out, _ = kernel.compile(given)(given)
    assert row_errors(out, reference_rel_attention(**call)).max() > LIMITS["bfloat16"]


REFUSED = {
    "causal": {"causal": False, "window_right": None},
    "dtype": {"dtype": "float32", "out_dtype": "float32"},
    "num_kv_heads": {"num_heads": 17, "num_kv_heads": 1},
    "block_size": {"block_size": 12},
    "rel_extent": {"rel_extent": 100},
    "batch_size": {"batch_size": 100_000},
    "empty": {"num_tokens": 0},
}
ALSO_REFUSED = {
    hopper: {"head_dim": {"head_dim": 80}, "head_dim of many rows": {"head_dim": 256, "max_seqlen_q": 64}},
    blackwell: {"head_dim": {"head_dim": 256}, "rows and keys": {"batch_size": 2**15, "max_blocks": 2**24}},
}


@pytest.mark.parametrize(
    ("module", "facts"),
    [
        pytest.param(module, facts, id=f"{module.__name__.split('.')[-1]}: {what}")
        for module, more in ALSO_REFUSED.items()
        for what, facts in (REFUSED | more).items()
    ],
)
def test_refuses_what_it_lacks_with_a_sentence(module, facts):
    names = ("plan", "config", "kv_offset", "total_seqlens", "out", "out_dtype", "num_splits")
    given = {"backend": "portable", "interpret": False, "return_lse": False}
    problem = check_call({**build(small((1,), (64,))), **dict.fromkeys(names), **given}).problem
    assert module.unsupported(problem) is None
    sentence = str(module.unsupported(dataclasses.replace(problem, **facts)))
    assert "must" in sentence
    assert "; got" in sentence
    assert sentence.replace("'", '"').endswith('Use backend="portable".')


@pytest.mark.parametrize("capability", [(10, 0), (11, 0)])
def test_auto_takes_portable_and_names_the_command_that_would_check(capability, monkeypatch):
    monkeypatch.setattr(dispatch, "device_capability", lambda *_: capability)
    dispatch._warn_once.cache_clear()
    call = build(small((1,), (64,)))
    with pytest.warns(ip.PortableFallbackWarning, match="python -m inkling_pallas check --backend blackwell"):
        ip.inkling_rel_attention(**call)
    explained = ip.explain(**call)
    assert explained.backend == "portable"
    assert "has not run on a card" in explained.passed_over["blackwell"]
    assert ip.explain(**call, backend="blackwell").backend == "blackwell"
