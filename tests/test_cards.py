"""What is decided from a card's facts, and that deciding costs a call nothing twice."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import inkling_pallas as ip
from inkling_pallas import attention
from inkling_pallas.core import checked_call, devices, dispatch
from inkling_pallas.core.devices import B200, H200, Card
from inkling_pallas.core.problem import Problem
from inkling_pallas.kernels import blackwell, hopper, write_kv
from inkling_pallas.kernels.blackwell import backend as blackwell_backend
from inkling_pallas.kernels.hopper import configs
from inkling_pallas.kernels.shear.tiling import ShearTiles
from inkling_pallas.testing.cases import Case, build

pytestmark = pytest.mark.host

# The SMs of Hopper cards (H20, H100 PCIe, H200), and numbers that no card has.
SM_COUNTS = (1, 7, 78, 114, 132, 144, 147)
BATCHES: dict[str, dict[str, Any]] = {
    "decode": {},
    "one sequence": {"batch_size": 1, "num_tokens": 1},
    "one sequence, window": {"batch_size": 1, "num_tokens": 1, "window_left": 511, "num_kv_heads": 16},
    "many, window": {"batch_size": 128, "num_tokens": 128, "window_left": 511, "num_kv_heads": 16},
    "prefill": {"num_tokens": 8192, "max_seqlen_q": 8192, "batch_size": 1},
    "mixed": {"num_tokens": 4096, "max_seqlen_q": 2048},
}


def problem_of(**facts: Any) -> Problem:
    sizes: dict[str, Any] = {"num_tokens": 32, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "batch_size": 32}
    pages = {"num_blocks": 4096, "block_size": 128, "max_blocks": 64, "max_seqlen_q": 1, "num_splits": None}
    rest = {"softmax_scale": 1 / 128, "causal": True, "window_left": None, "window_right": 0, "rel_extent": 512}
    kinds = {"dtype": "bfloat16", "out_dtype": "bfloat16", "return_lse": False}
    return Problem(**(sizes | pages | rest | kinds | facts))


def ctas_of(config: hopper.Config) -> int:
    assert config.num_ctas is not None
    return config.num_ctas


@pytest.mark.parametrize("num_sms", SM_COUNTS)
@pytest.mark.parametrize("name", BATCHES)
def test_a_grid_is_one_wave_on_any_card(name, num_sms):
    problem, card = problem_of(**BATCHES[name]), dataclasses.replace(H200, num_sms=num_sms)
    whole = hopper.choose_config(problem, card)
    assert whole.few_rows is None or ctas_of(whole.few_rows) == num_sms
    assert ctas_of(whole) % whole.cluster_size == 0
    tiling_of = configs.tiling_of if whole.program == "decode" else configs.row_tiling_of
    assert tiling_of(problem, whole).num_ctas == ctas_of(whole)
    two_share_an_sm = "window" in name and ctas_of(whole) == 2 * num_sms
    assert two_share_an_sm or ctas_of(whole) <= max(num_sms, whole.cluster_size)
    assert blackwell.choose_config(problem, dataclasses.replace(B200, num_sms=num_sms)).num_ctas == num_sms


@pytest.mark.parametrize("name", ["decode", "many, window", "prefill", "mixed"])
@pytest.mark.parametrize("num_sms", [78, 114, 132])
def test_every_sm_has_work_where_there_is_enough(name, num_sms):
    card = dataclasses.replace(H200, num_sms=num_sms)
    assert ctas_of(hopper.choose_config(problem_of(**BATCHES[name]), card)) >= num_sms


def test_clusters_are_as_on_an_h200_in_proportion():
    local = problem_of(**BATCHES["one sequence, window"])
    sizes = {n: hopper.choose_config(local, dataclasses.replace(H200, num_sms=n)).cluster_size for n in (132, 114, 78)}
    assert sizes == {132: 8, 114: 4, 78: 4}


def test_less_shared_memory_makes_smaller_tiles_or_none():
    small = dataclasses.replace(H200, cta_smem=99 * 1024)
    config = hopper.choose_config(problem_of(), small)
    assert config.block_kv * config.num_stages < 256
    assert hopper.unsupported(problem_of(), small) is None
    assert "shared memory" in str(hopper.unsupported(problem_of(), dataclasses.replace(H200, cta_smem=20 * 1024)))
    assert "shared memory" in str(blackwell.unsupported(problem_of(), dataclasses.replace(B200, cta_smem=20 * 1024)))


def test_the_other_kernels_ask_the_card_too():
    table = jax.ShapeDtypeStruct((8192, 64, 512), jnp.bfloat16)
    cards = [dataclasses.replace(H200, num_sms=n) for n in (78, 132)]
    assert [ShearTiles.make(table, 512, False, card=card).workers for card in cards] == [2 * 78, 2 * 132]
    cache = (jnp.zeros((4, 16, 1, 64), jnp.bfloat16),) * 2
    assert [write_kv.describe(cache, "separate", 4000, card).run for card in cards] == [7, 4]


class _Device:
    def __init__(self, **facts: Any) -> None:
        vars(self).update(facts)


def test_a_device_is_asked_for_its_facts(monkeypatch):
    facts = {"compute_capability": "9.0", "core_count": 78, "shared_memory_per_block_optin": 200_000}
    assert devices.card_of(_Device(compute_capability="9.0")) == H200
    assert devices.card_of(_Device(compute_capability="10.3")) == B200
    assert devices.card_of(_Device(platform="cpu")) is None
    card = devices.card_of(_Device(**facts))
    assert card == Card(num_sms=78, cta_smem=200_000, l2_cache=H200.l2_cache)
    monkeypatch.setattr(dispatch, "default_device", lambda: _Device(**facts))
    assert dispatch.usual_card("hopper") == card
    assert dispatch.usual_card("blackwell") == B200
    assert dispatch.choose(problem_of(), "hopper", None).config.num_ctas == 78
    given = hopper.Config(block_kv=64, num_stages=2)
    assert dispatch.choose(problem_of(), "hopper", given).config == dataclasses.replace(given, num_ctas=78)


def test_shared_memory_of_several_ctas_is_what_the_driver_leaves():
    assert [H200.smem_of(n) // 1024 for n in (1, 2, 4)] == [227, 113, 56]


@pytest.fixture
def call(monkeypatch) -> dict[str, Any]:
    """Arguments of a call for the Hopper kernel, whose launch is left out."""
    monkeypatch.setattr(attention, "_jitted_operator", lambda *_: (None, None))
    monkeypatch.setattr(attention, "require_device", lambda *_: None)
    sizes: dict[str, Any] = {"num_heads": 24, "num_kv_heads": 3, "block_size": 24}
    return build(Case(name="host", kind="example", q_lens=(1, 1), kv_lens=(40, 9), **sizes)) | {"backend": "hopper"}


def _count(monkeypatch, module: Any, name: str) -> list[None]:
    counted, real = [], getattr(module, name)

    def counting(*args: Any) -> Any:
        counted.append(None)
        return real(*args)

    monkeypatch.setattr(module, name, counting)
    return counted


def test_candidates_are_built_once_a_shape(call, monkeypatch):
    checked_call._decide.cache_clear()  # other tests have the same call
    configs.candidates.cache_clear()
    built = _count(monkeypatch, configs, "_decode_candidates")
    for _ in range(3):
        ip.inkling_rel_attention(**call)
        ip.explain(**call)
    assert len(built) == 1
    ip.inkling_rel_attention(**call | {"return_lse": True})
    assert len(built) == 2


def test_a_cache_that_forgets_is_seen(call, monkeypatch):
    built = _count(monkeypatch, configs, "_decode_candidates")
    candidates = configs.candidates.__wrapped__
    monkeypatch.setattr("inkling_pallas.kernels.hopper.backend.candidates", candidates)
    monkeypatch.setattr(checked_call, "_decide", _Uncached(checked_call._decide.__wrapped__))
    for _ in range(3):
        ip.inkling_rel_attention(**call | {"num_splits": 2})
    assert len(built) == 6


class _Uncached:
    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args)


@pytest.mark.parametrize("wrong", [{"max_seqlen_q": True}, {"causal": 1}, {"window_size": (True, -1)}, {"config": {}}])
def test_a_right_call_before_it_does_not_hide_a_wrong_one(call, wrong):
    ip.inkling_rel_attention(**call)
    with pytest.raises(ValueError, match="must be"):
        ip.inkling_rel_attention(**call | wrong)


def test_what_a_call_looks_up_is_that_of_its_dtype_and_layout(call):
    one = checked_call.check_call(attention._bound(*_split(call)))
    half = {
        name: value.astype(jnp.float16) for name, value in call.items() if getattr(value, "dtype", None) == "bfloat16"
    }
    other = checked_call.check_call(attention._bound(*_split(call | half)))
    assert (one.problem.dtype, other.problem.dtype) == ("bfloat16", "float16")
    assert one.problem is checked_call.check_call(attention._bound(*_split(call))).problem


def _split(call: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    rest = {name: value for name, value in call.items() if name not in ("q", "key_cache", "value_cache")}
    return call["q"], call["key_cache"], call["value_cache"], rest


def test_blackwell_builds_its_candidates_once(monkeypatch):
    built = _count(monkeypatch, blackwell_backend, "tiling_of")
    problem = problem_of(num_heads=40, num_kv_heads=5)
    first = blackwell.choose_config(problem)
    count = len(built)
    assert blackwell.choose_config(problem) == first
    assert len(built) == count > 0
