"""The Blackwell kernel in the GPU interpreter, race detector on, against the float64 oracle."""

import dataclasses
from typing import Any

import interpreted
import jax
import numpy as np
import pytest
from interpreted import LIMITS
from test_sheared import shear_call

import inkling_pallas as ip
from inkling_pallas.core import dispatch
from inkling_pallas.core.checked_call import check_call
from inkling_pallas.kernels import blackwell
from inkling_pallas.kernels.phases import bias
from inkling_pallas.testing import assert_rows_close, row_errors
from inkling_pallas.testing.cache_cases import before_write
from inkling_pallas.testing.cases import Case, build
from inkling_pallas.testing.reference import reference_rel_attention

# The interpreter multiplies tiles with NumPy, which warns of the infinities that masks remove.
pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]

TILES = {"splits": False, "num_ctas": 2}
SPLITS = {"splits": True, "num_ctas": 3}


def small(name, q_lens, kv_lens, **kwargs):
    facts: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 1, "rel_extent": 128, "block_size": 16}
    return Case(name=name, kind="interpreter", q_lens=q_lens, kv_lens=kv_lens, **facts | kwargs)


# Each kind of the catalogue that the kernel takes, some in one batch, but for those of the tests after this one.
CASES = [
    (small("full prefill, mixed", (17, 1, 20), (17, 130, 70), padding_rows=2, padding_sequences=1), TILES),
    (small("chunked prefill", (18, 5), (170, 40), rel_extent=64), TILES),
    (small("window", (20,), (160,), window_size=(60, 0), num_heads=4), {**TILES, "band_slots": 2}),
    (small("zero lengths", (0, 1, 0, 2), (0, 3, 7, 2), rel_extent=8, window_size=(4, 0), block_size=8), TILES),
    (small("groups, pages", (33, 2), (90, 30), num_heads=3, rel_extent=64, block_size=48), TILES),
    (small("extent, packed", (19,), (90,), num_heads=6, num_kv_heads=2, rel_extent=20, layout="packed"), TILES),
    (
        small("dtypes, head_dim", (20, 1), (130, 65), head_dim=64, dtype="float16", rel_extent=64),
        {**TILES, "block_kv": 128},
    ),
    (
        small("multi-token decode, freed", (5, 3), (150, 75), window_size=(60, 0), freed_pages=True, num_splits=3),
        SPLITS,
    ),
    (
        small("write_kv, no split", (1, 1), (100, 0), num_kv_heads=2, num_splits=1, layout="interleaved", write=True),
        SPLITS,
    ),
]


def attend(call, choice, **overrides):
    return interpreted.attend(call, config_of(choice), kernel=blackwell, **overrides)


def config_of(choice):
    return blackwell.Config(**{"num_stages": 2, **choice})


@pytest.mark.parametrize(("case", "choice"), CASES, ids=[case.name for case, _ in CASES])
def test_matches_the_oracle_without_a_race(case, choice, capfd):
    call = build(case)
    given = dict(call, key_cache=jax.jit(ip.write_kv)(*before_write(case))) if case.write else call
    interpreted.assert_right(attend(shear_call(given), choice), call, capfd, LIMITS[case.dtype])


def test_one_compiled_decode_is_right_as_the_cache_grows_and_whatever_must_not_matter(capfd):
    case = small("decode", (1, 2), (300, 40), rel_extent=64)
    run = interpreted.compiled(shear_call(build(case)), config_of(SPLITS), kernel=blackwell)

    def assert_right(call):
        interpreted.assert_right(run(shear_call(call)), call, capfd, LIMITS["bfloat16"])

    for facts in ({"poison_value": np.inf}, {"spike": 0}, {"spike": 63}):
        assert_right(build(dataclasses.replace(case, **facts)))
    finite = build(dataclasses.replace(case, poison=()))
    for lengths in ((1, 2), (129, 0)):
        assert_right(dict(finite, cache_seqlens=np.array(lengths, np.int32)))
    expected = np.asarray(reference_rel_attention(**finite))[1:]
    for name, value in (("block_table", 2**30), ("cu_seqlens_q", 2)):
        spoiled = finite[name].copy()
        spoiled.flat[0] = value
        out, _ = run(shear_call({**finite, name: spoiled}))
        assert_rows_close(out[1:], expected, limit=LIMITS["bfloat16"])


def test_parts_far_past_or_before_their_keys_are_right_and_a_plain_table_is_sheared(capfd):
    call = build(small("parts", (1, 2, 1), (100, 64, 30)))
    call |= {"window_size": (63, 0), "kv_offset": np.array([0, 40, 500], np.int32)}
    call["total_seqlens"] = np.array([1000, 104, 530], np.int32)
    for cache in ("key_cache", "value_cache"):
        call[cache] = np.nan_to_num(call[cache].astype(np.float32)).astype(call[cache].dtype)
    interpreted.assert_right(attend(call, SPLITS), call, capfd, LIMITS["bfloat16"])


def test_writes_float32_into_the_array_given_as_out():
    interpreted.assert_writes_into_out(lambda call, **how: attend(shear_call(call), TILES, **how), 9)


def test_a_bias_one_step_off_is_red(monkeypatch):
    call, shift_of = build(small("broken", (3,), (40,), rel_extent=64)), bias.shift_of
    monkeypatch.setattr(bias, "shift_of", lambda position, extent: shift_of(position + 8 - 1, extent))
    out, _ = attend(shear_call(call), TILES)
    assert row_errors(out, reference_rel_attention(**call)).max() > LIMITS["bfloat16"]


REFUSED = {
    "causal": {"causal": False, "window_right": None},
    "dtype": {"dtype": "float32", "out_dtype": "float32"},
    "head_dim": {"head_dim": 256},
    "num_kv_heads": {"num_heads": 17, "num_kv_heads": 1},
    "block_size": {"block_size": 12},
    "rel_extent": {"rel_extent": 100},
    "batch_size": {"batch_size": 100_000},
    "rows and keys": {"batch_size": 2**15, "max_blocks": 2**24},
    "empty": {"num_tokens": 0},
}


@pytest.mark.parametrize("fact", REFUSED)
def test_refuses_what_it_lacks_with_a_sentence(fact):
    names = ("plan", "config", "kv_offset", "total_seqlens", "out", "out_dtype", "num_splits")
    given = {"backend": "portable", "interpret": False, "return_lse": False}
    problem = check_call({**build(small("refused", (1,), (64,))), **dict.fromkeys(names), **given}).problem
    assert blackwell.unsupported(problem) is None
    sentence = str(blackwell.unsupported(dataclasses.replace(problem, **REFUSED[fact])))
    assert "must" in sentence
    assert "; got" in sentence
    assert sentence.replace("'", '"').endswith('Use backend="portable".')


@pytest.mark.parametrize("capability", [(10, 0), (11, 0)])
def test_auto_takes_portable_and_names_the_command_that_would_check(capability, monkeypatch):
    monkeypatch.setattr(dispatch, "device_capability", lambda *_: capability)
    dispatch._warn_once.cache_clear()
    call = build(small("auto", (1,), (64,)))
    with pytest.warns(ip.PortableFallbackWarning, match="python -m inkling_pallas check --backend blackwell"):
        ip.inkling_rel_attention(**call)
    explained = ip.explain(**call)
    assert explained.backend == "portable"
    assert "has not run on a card" in explained.passed_over["blackwell"]
    assert ip.explain(**call, backend="blackwell").backend == "blackwell"
