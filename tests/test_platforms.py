"""Which device a call runs on, and code that is right on the device it is compiled for, whatever was guessed."""

from typing import Any

import absent_card
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from lowered import kernels_in
from steps import arguments, make_step, on_card
from writes import assert_pool_in_place

import inkling_pallas as ip
from inkling_pallas.core import devices
from inkling_pallas.testing.cases import Case, build

SIZES: dict[str, Any] = {"kind": "example", "head_dim": 64, "rel_extent": 48, "kv_lens": (70, 9)}
CALLS = {
    "decode": build(Case(name="decode", q_lens=(1, 1), **SIZES)),
    "prefill": build(Case(name="prefill", q_lens=(40, 3), **SIZES)),
}
TOKENS = 1100  # from 1,024 on a write is the kernel's


class Card:
    """What a device says of itself."""

    compute_capability, device_kind, platform, core_count = "9.0", "NVIDIA H200", "gpu", 132


@pytest.fixture
def card(monkeypatch) -> Any:
    """The default device is an H200, as far as anybody can tell before something runs."""
    found = Card()
    monkeypatch.setattr(devices, "default_device", lambda: found)
    return found


def split(call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays and the static arguments of a call."""
    arrays = {name: value for name, value in call.items() if hasattr(value, "dtype")}
    return arrays, {name: value for name, value in call.items() if name not in arrays}


def attend(static: dict[str, Any], arrays: dict[str, Any], plan: Any = None) -> Any:
    return ip.inkling_rel_attention(**arrays, **static, plan=plan, return_lse=True)


def attend_planned(static: dict[str, Any], arrays: dict[str, Any]) -> Any:
    return attend(static, arrays, ip.plan_batch(**arrays, **static))


def lengths_of(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: arrays[name] for name in ("cu_seqlens_q", "cache_seqlens")}


def shear(_: dict[str, Any], arrays: dict[str, Any]) -> Any:
    return ip.shear(arrays["rel_logits"], **lengths_of(arrays)).table


def project(_: dict[str, Any], arrays: dict[str, Any]) -> Any:
    r, proj = arrays["rel_logits"][:, :, :16], jnp.ones((16, 48), jnp.bfloat16)
    return ip.sheared_relative_logits(r, proj, **lengths_of(arrays)).table


def write(_: dict[str, Any], arrays: dict[str, Any]) -> Any:
    cache = ip.PagedKVCache.separate(arrays["key_cache"], arrays["value_cache"])
    new = jnp.ones((TOKENS, cache.num_kv_heads, cache.head_dim), jnp.bfloat16)
    return ip.write_kv(cache, new, new, jnp.arange(TOKENS, dtype=jnp.int32) - TOKENS + 40).arrays


# What runs, on which call, and how many kernels the program for a card has.
RUNS = {
    "decode": (attend, "decode", 1),
    "planned prefill": (attend_planned, "prefill", 2),
    "shear": (shear, "decode", 1),
    "project": (project, "decode", 1),
    "write": (write, "decode", 1),
}


def assert_same_bits(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.lowering
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.full] * (x == "planned prefill")) for x in RUNS])
def test_a_traced_call_has_the_code_of_the_platform_it_is_compiled_for(name, card):
    run, call, kernels = RUNS[name]
    arrays, static = split(CALLS[call])
    jitted = jax.jit(lambda arrays: run(static, arrays))
    arrays = jax.device_put(arrays, jax.devices("cpu")[0])
    assert_same_bits(jitted(arrays), run(static, arrays))
    traced = jitted.trace(arrays)
    assert kernels_in(traced.lower(lowering_platforms=("cpu",))) == 0
    assert kernels_in(traced.lower(lowering_platforms=("cuda",))) == kernels


@pytest.mark.parametrize("run", [lambda attend: attend, jax.jit])
def test_a_plan_of_a_kernel_is_left_where_there_is_no_card(run, card):
    arrays, static = split(CALLS["decode"])
    arrays = jax.device_put(arrays, jax.devices("cpu")[0])
    plan = ip.plan_batch(**arrays, **static, backend="hopper", interpret=True)
    assert plan.backend == "hopper"
    got = run(lambda arrays, plan: attend(static, arrays, plan))(arrays, plan)
    assert_same_bits(got, attend(static, arrays))
    with pytest.raises(NotImplementedError, match="'hopper' must run on its own GPUs"):
        run(lambda arrays, plan: attend(static | {"backend": "hopper"}, arrays, plan))(arrays, plan)


def test_arrays_say_where_an_eager_call_runs(card):
    arrays, static = split(CALLS["decode"])
    here = jax.devices("cpu")[0]
    assert ip.explain(**arrays, **static).backend == "hopper"
    put = arrays | {"key_cache": jax.device_put(arrays["key_cache"], here)}
    assert ip.explain(**put, **static).backend == "portable"
    assert ip.explain(**put, **static).device == here.device_kind
    # An array that was put nowhere goes where the others are.
    assert devices.place_of([jnp.ones(2), put["key_cache"]]) == (here, False)
    assert devices.place_of([jnp.ones(2), arrays["q"], None]) == (card, False)


def test_shapes_say_it_too():
    if absent_card.missing():
        pytest.skip(f"no device that is not here: {absent_card.missing()}")
    arrays, static = split(CALLS["decode"])
    assert ip.explain(**on_card(arrays), **static).backend == "hopper"


@pytest.mark.lowering
@pytest.mark.full
def test_a_step_over_layers_is_right_here_and_in_place_on_a_card(card):
    step = make_step("auto")
    here: Any = lambda: jax.device_put(arguments("decode"), jax.devices("cpu")[0])  # noqa: E731
    assert_same_bits(step(*here()), make_step("portable")(*here()))
    exported = export.export(step, platforms=("cuda",))(*arguments("decode"))
    if absent_card.missing():
        pytest.skip(f"no compile for a card: {absent_card.missing()}")
    compiled: Any = jax.jit(exported.call, donate_argnums=0).lower(*on_card(arguments("decode"))).compile()
    assert_pool_in_place(compiled)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 1
    assert "conditional" not in compiled.as_text()


def test_an_export_for_two_platforms_says_what_to_do(card):
    arrays, static = split(CALLS["decode"])
    with pytest.raises(NotImplementedError, match="one platform at a time, or name backend='portable'"):
        export.export(jax.jit(lambda arrays: attend(static, arrays)), platforms=("cpu", "cuda"))(arrays)


@pytest.mark.gpu
def test_a_traced_call_has_its_kernel_where_a_cpu_is_the_default_device():
    arrays, static = split(CALLS["decode"])
    arrays = jax.device_put(arrays, jax.devices("cuda")[0])
    with jax.default_device(jax.devices("cpu")[0]):
        assert ip.explain(**arrays, **static).backend == "hopper"
        assert kernels_in(jax.jit(lambda arrays: attend(static, arrays)).lower(arrays)) == 1
