"""The operator as a part of a JAX program: jit, scan, vmap, donation, dtypes, plans, traces, memory."""

import dataclasses
import functools
import time
import warnings
from typing import Any

import absent_card
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inkling_pallas as ip
from inkling_pallas import attention
from inkling_pallas.core import dispatch
from inkling_pallas.kernels import hopper
from inkling_pallas.testing import assert_rows_close
from inkling_pallas.testing.cases import Case, build
from inkling_pallas.testing.reference import reference_rel_attention

pytestmark = pytest.mark.optimized

_MIXED = Case(name="mixed", kind="attention", q_lens=(33, 1, 7), kv_lens=(70, 200, 7), padding_rows=3)
_LIMIT = 8e-3


def _split(call):
    """Returns (arrays, static) of a call."""
    arrays = {key: jnp.asarray(value) for key, value in call.items() if isinstance(value, np.ndarray)}
    return arrays, {key: value for key, value in call.items() if key not in arrays}


def _assert_right(call, **how):
    out, lse = ip.inkling_rel_attention(**call, return_lse=True, **how)
    expected, expected_lse = ip.reference_rel_attention(**call, return_lse=True)
    assert_rows_close(out, expected, limit=_LIMIT, actual_lse=lse, expected_lse=expected_lse)
    return out, lse


def test_result_has_the_promised_form():
    call = build(_MIXED)
    out, lse = _assert_right(call)
    chex.assert_shape(out, (44, 8, 128))
    chex.assert_type([out, lse], [jnp.bfloat16, jnp.float32])
    chex.assert_shape(lse, (44, 8))
    chex.assert_trees_all_equal(out[-3:], jnp.zeros_like(out[-3:]))
    assert jnp.isneginf(lse[-3:]).all()


def test_without_lse_the_result_is_one_array_of_the_same_bits():
    call = build(_MIXED)
    chex.assert_trees_all_equal(ip.inkling_rel_attention(**call), ip.inkling_rel_attention(**call, return_lse=True)[0])


def test_float32_result_of_16_bit_inputs():
    call = build(_MIXED)
    out, _ = _assert_right(call, out_dtype=jnp.float32)
    chex.assert_type(out, jnp.float32)


def test_jit_eager_and_numpy_inputs_agree():
    call = build(_MIXED)
    arrays, static = _split(call)
    jitted = jax.jit(functools.partial(ip.inkling_rel_attention, **static))(**arrays)
    chex.assert_trees_all_equal(jitted, ip.inkling_rel_attention(**arrays, **static), ip.inkling_rel_attention(**call))


def test_one_trace_over_changing_batches():
    @functools.partial(jax.jit, static_argnames=static_names())
    @chex.assert_max_traces(n=1)
    def run(**call):
        return ip.inkling_rel_attention(**call)

    chex.clear_trace_counter()
    for seed in range(4):
        call = build(dataclasses.replace(_MIXED, seed=seed))
        call["cache_seqlens"] = np.array([70 - seed, 200 - 50 * seed, 7], np.int32)
        expected = ip.reference_rel_attention(**call)
        keep = call["cu_seqlens_q"][1]  # row positions moved with the lengths; the poisoned tails are still dead
        assert_rows_close(run(**_hashable(call))[keep:], expected[keep:], limit=_LIMIT)


def static_names():
    return ("max_seqlen_q", "softmax_scale", "causal", "window_size", "rel_extent", "num_splits")


def _hashable(call):
    return {key: jnp.asarray(value) if isinstance(value, np.ndarray) else value for key, value in call.items()}


def test_an_eager_call_compiles_once():
    call = build(_MIXED)
    ip.inkling_rel_attention(**call)
    with jax.log_compiles(), warnings.catch_warnings(), _no_compile():
        ip.inkling_rel_attention(**call)
        ip.inkling_rel_attention(**build(dataclasses.replace(_MIXED, seed=5)))


class _no_compile:
    """Fails if a block traces or compiles anything of the operator."""

    def __enter__(self):
        self._function: Any = attention._jitted_operator
        self._size = self._function._cache_size()

    def __exit__(self, *_):
        assert self._function._cache_size() == self._size


def test_max_seqlen_q_is_a_bucket():
    call = build(_MIXED)
    base = ip.inkling_rel_attention(**call)
    with _no_compile():
        ip.inkling_rel_attention(**{**call, "max_seqlen_q": 64})
        ip.inkling_rel_attention(**{**call, "max_seqlen_q": 40})
    large = ip.inkling_rel_attention(**{**call, "max_seqlen_q": 2048})
    assert_rows_close(large, np.asarray(base, np.float64), limit=_LIMIT)


def test_rows_past_max_seqlen_q_are_zero():
    call = build(_MIXED)
    expected = ip.reference_rel_attention(**call)
    out, lse = ip.inkling_rel_attention(**{**call, "max_seqlen_q": 16}, return_lse=True)
    assert not np.asarray(out[16:33], np.float32).any()
    assert np.isneginf(lse[16:33]).all()
    rest = np.r_[0:16, 33:41]
    assert_rows_close(out[rest], expected[rest], limit=_LIMIT)


@pytest.mark.parametrize("num_splits", [1, 2, 8, 1000])
def test_num_splits_is_only_a_bound(num_splits):
    _assert_right({**build(_MIXED), "num_splits": num_splits})


def test_out_is_used_when_donated():
    arrays, static = _split(build(_MIXED))

    @functools.partial(jax.jit, donate_argnames="out")
    def run(arrays, out):
        return ip.inkling_rel_attention(**arrays, **static, out=out)

    out = jnp.full((44, 8, 128), jnp.nan, jnp.bfloat16)
    compiled = run.lower(arrays, out).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= out.nbytes
    pointer = out.unsafe_buffer_pointer()
    result = run(arrays, out)
    assert out.is_deleted()
    assert result.unsafe_buffer_pointer() == pointer
    chex.assert_trees_all_equal(result, ip.inkling_rel_attention(**arrays, **static))


def test_out_survives_when_it_is_not_donated():
    call = build(_MIXED)
    out = jnp.ones((44, 8, 128), jnp.bfloat16)
    ip.inkling_rel_attention(**call, out=out)
    chex.assert_trees_all_equal(out, jnp.ones_like(out))


def test_a_scan_over_layers_shares_one_plan():
    arrays, static = _split(build(_MIXED))
    layers = {key: jnp.stack([arrays[key], -arrays[key]]) for key in ("q", "key_cache", "value_cache", "rel_logits")}
    batch = {key: value for key, value in arrays.items() if key not in layers}

    @jax.jit
    def run(layers):
        plan = ip.plan_batch(
            **jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layers), **batch, **static
        )
        return jax.lax.scan(lambda c, x: (c, ip.inkling_rel_attention(**x, **batch, **static, plan=plan)), 0, layers)[1]

    scanned = run(layers)
    for index in range(2):
        alone = ip.inkling_rel_attention(**jax.tree.map(lambda x, i=index: x[i], layers), **batch, **static)
        chex.assert_trees_all_equal(scanned[index], alone)


def _assert_vmap_is_a_loop(case, **how):
    """On a card the kernels run: under vmap jax gives their grid an axis of layers."""
    arrays, static = _split(build(case))
    layers = {key: jnp.stack([arrays[key], -arrays[key]]) for key in ("q", "key_cache", "value_cache", "rel_logits")}
    batch = {key: value for key, value in arrays.items() if key not in layers}
    mapped = jax.jit(jax.vmap(lambda x: ip.inkling_rel_attention(**x, **batch, **static, **how)))(layers)
    for index in range(2):
        layer = jax.tree.map(lambda x, i=index: np.asarray(x[i]), layers)
        assert_rows_close(mapped[index], ip.reference_rel_attention(**layer, **batch, **static), limit=_LIMIT)


def test_vmap_over_a_leading_layer_axis():
    _assert_vmap_is_a_loop(_MIXED)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_vmap_of_a_kernel():
    case = Case(name="vmap", kind="", q_lens=(1, 2), kv_lens=(40, 9), head_dim=64, rel_extent=16)
    config = hopper.Config(block_kv=64, num_stages=2, num_ctas=1)
    _assert_vmap_is_a_loop(case, backend="hopper", config=config, interpret=True)


def test_a_plan_is_checked_and_decides_the_lengths():
    call = build(_MIXED)
    plan = ip.plan_batch(**call)
    chex.assert_trees_all_equal(ip.inkling_rel_attention(**call, plan=plan), ip.inkling_rel_attention(**call))
    chex.assert_trees_all_equal(plan, jax.jit(lambda: ip.plan_batch(**call))())
    message = r"^plan must be made for window_left = 63; got None. Make one plan_batch per kind of layer.$"
    with pytest.raises(ValueError, match=message):
        ip.inkling_rel_attention(**{**call, "window_size": (63, 0)}, plan=plan)
    zero = {**call, "cache_seqlens": np.zeros(3, np.int32)}
    ip.check_batch(**call, plan=plan)
    message = r"^plan must be made for the lengths of this call; got a plan of others. Make one plan_batch a step.$"
    with pytest.raises(ValueError, match=message):
        ip.check_batch(**call, plan=ip.plan_batch(**zero))
    assert not np.asarray(ip.inkling_rel_attention(**call, plan=ip.plan_batch(**zero)), np.float32).any()


def test_a_plan_needs_no_data():
    call = build(_MIXED)
    shapes = {key: jax.ShapeDtypeStruct(call[key].shape, call[key].dtype) for key in ("q", "key_cache", "value_cache")}
    rest = {key: value for key, value in call.items() if key not in (*shapes, "rel_logits", "softmax_scale")}
    plan = ip.plan_batch(**shapes, **rest)
    chex.assert_trees_all_equal(plan, ip.plan_batch(**call))
    chex.assert_trees_all_equal(ip.inkling_rel_attention(**call, plan=plan), ip.inkling_rel_attention(**call))


@pytest.mark.parametrize("enable_x64", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_x64_changes_nothing(enable_x64, dtype):
    call = build(dataclasses.replace(_MIXED, dtype=dtype))
    with jax.enable_x64(enable_x64):
        out, lse = ip.inkling_rel_attention(**call, return_lse=True)
    chex.assert_type([out, lse], [jnp.dtype(dtype), jnp.float32])
    chex.assert_trees_all_equal(out, ip.inkling_rel_attention(**call))


@pytest.mark.parametrize(
    "transform", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,)), lambda f: lambda x: jax.linearize(f, x)]
)
@pytest.mark.parametrize("name", ["q", "key_cache", "rel_logits"])
def test_a_derivative_is_refused_in_plain_words(transform, name):
    arrays, static = _split(build(_MIXED))

    def loss(x):
        out: Any = ip.inkling_rel_attention(**{**arrays, name: x}, **static)
        return out.astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="has no derivative: it is an inference operator over a cache"):
        transform(loss)(arrays[name])
    with pytest.raises(NotImplementedError, match="has no derivative"):
        transform(jax.jit(loss))(arrays[name])


def test_a_stopped_gradient_passes():
    arrays, static = _split(build(_MIXED))
    q = arrays.pop("q")

    def loss(q):
        out: Any = ip.inkling_rel_attention(jax.lax.stop_gradient(q), **arrays, **static)
        return out.astype(jnp.float32).sum() + q.astype(jnp.float32).sum()

    chex.assert_trees_all_equal(jax.grad(loss)(q), jnp.ones_like(q))


@pytest.mark.parametrize("shape", ["no rows", "no sequences", "no pages", "no table"])
def test_empty_shapes(shape):
    call = build(Case(name="empty", kind="attention", q_lens=(2,), kv_lens=(5,)))
    if shape == "no rows":
        call |= {"q": call["q"][:0], "rel_logits": call["rel_logits"][:0]}
    elif shape == "no sequences":
        call |= {
            "block_table": call["block_table"][:0],
            "cache_seqlens": call["cache_seqlens"][:0],
            "cu_seqlens_q": np.zeros(1, np.int32),
        }
    elif shape == "no pages":
        call |= {"key_cache": call["key_cache"][:0], "value_cache": call["value_cache"][:0]}
    else:
        call |= {"block_table": call["block_table"][:, :0]}
    out, lse = ip.inkling_rel_attention(**call, return_lse=True)
    assert out.shape == call["q"].shape
    assert not np.asarray(out, np.float32).any()
    assert np.isneginf(lse).all()


def test_explain_says_what_and_why():
    arrays, static = _split(build(_MIXED))
    explanation = ip.explain(**jax.device_put(arrays, jax.devices("cpu")[0]), **static)
    assert explanation.backend == "portable"
    assert explanation.capability is None
    assert str(explanation).startswith("backend 'portable' with Config(block_q=64")
    assert "no faster one: kernels need an NVIDIA GPU, and this device is none" in str(explanation)


def test_a_gpu_call_on_portable_warns_once(monkeypatch):
    monkeypatch.setattr(dispatch, "device_capability", lambda *_: (8, 0))
    dispatch._warn_once.cache_clear()
    with pytest.warns(
        ip.PortableFallbackWarning, match="takes the portable backend on a GPU, which is slower than a kernel"
    ):
        ip.inkling_rel_attention(**build(_MIXED))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ip.inkling_rel_attention(**build(_MIXED))


def test_parts_of_the_computation_are_named():
    arrays, static = _split(build(_MIXED))
    operator = functools.partial(ip.inkling_rel_attention, **static, backend="portable")
    text = jax.jit(operator).lower(**arrays).compile().as_text()
    for scope in ("inkling_rel_attention", "inkling_plan_batch", "read_pages", "scores", "bias", "softmax", "values"):
        assert scope in text, scope


def _prefill(tokens, num_kv_heads, window):
    """Returns (jitted operator, its arguments) of one prefill of the per-device shapes of Inkling."""
    shape = {"num_heads": 8, "num_kv_heads": num_kv_heads, "rel_extent": 1024 if window == (-1, -1) else 512}
    pages = tokens // 128
    rows = jax.ShapeDtypeStruct((tokens, 8, 128), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((pages, 128, num_kv_heads, 128), jnp.bfloat16)
    arrays = {
        "q": rows,
        "key_cache": cache,
        "value_cache": cache,
        "rel_logits": jax.ShapeDtypeStruct((tokens, 8, shape["rel_extent"]), jnp.bfloat16),
        "block_table": jnp.arange(pages, dtype=jnp.int32)[None],
        "cache_seqlens": jnp.array([tokens], jnp.int32),
        "cu_seqlens_q": jnp.array([0, tokens], jnp.int32),
    }
    static = {
        "max_seqlen_q": tokens,
        "softmax_scale": 1 / 128,
        "causal": True,
        "window_size": window,
        "rel_extent": shape["rel_extent"],
    }
    return jax.jit(functools.partial(ip.inkling_rel_attention, **static, backend="portable")), arrays


def test_temporary_memory_of_a_long_prefill():
    run, arrays = _prefill(32768, 1, (-1, -1))
    memory: Any = run.lower(**arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 2**20


@pytest.mark.full
@pytest.mark.lowering
@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
def test_temporary_memory_of_a_long_prefill_on_a_card(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    run, arrays = _prefill(32768, 1, (-1, -1))
    card = jax.sharding.SingleDeviceSharding(absent_card.device())
    on_card = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=card) for name, x in arrays.items()}
    memory: Any = run.trace(**on_card).lower().compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 2**20


@pytest.mark.full
def test_a_local_prefill_costs_what_its_length_says():
    # On a CPU, processor time: what other processes do at the moment of the test is not the operator's cost.
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    runs, times = {}, {4096: [], 16384: []}
    for tokens in times:
        run, shapes = _prefill(tokens, 2, (511, 0))
        arrays = {
            k: jnp.ones(v.shape, v.dtype) if isinstance(v, jax.ShapeDtypeStruct) else v for k, v in shapes.items()
        }
        runs[tokens] = functools.partial(run, **arrays)
        jax.block_until_ready(runs[tokens]())
    for _ in range(3):
        for tokens, run in runs.items():
            start = clock()
            jax.block_until_ready(run())
            times[tokens].append(clock() - start)
    # Without its window a prefill four times as long costs sixteen times as much.
    assert np.median(times[16384]) <= 6 * np.median(times[4096])


def test_shard_map_over_heads():
    arrays, static = _split(build(_MIXED))
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    by_head = jax.P(None, "heads")
    by_kv_head = jax.P(None, None, "heads")
    specs = {"q": by_head, "rel_logits": by_head, "key_cache": by_kv_head, "value_cache": by_kv_head}
    in_specs = {name: specs.get(name, jax.P()) for name in arrays}
    over_heads = functools.partial(jax.shard_map, mesh=mesh, in_specs=(in_specs,), out_specs=by_head)
    run = over_heads(lambda x: ip.inkling_rel_attention(**x, **static), check_vma=False)
    chex.assert_trees_all_equal(jax.jit(run)(arrays), ip.inkling_rel_attention(**arrays, **static))
    # Checked, no kernel runs, on any device.
    portable = over_heads(lambda x: ip.inkling_rel_attention(**x, **static, backend="portable"))(arrays)
    assert_rows_close(portable, np.asarray(jax.jit(run)(arrays), np.float64), limit=_LIMIT)
    with pytest.raises(NotImplementedError, match="must have check_vma=False"):
        jax.jit(over_heads(lambda x: ip.inkling_rel_attention(**x, **static, backend="hopper"))).trace(arrays)
    explained = []
    jax.jit(over_heads(lambda x: explained.append(ip.explain(**x, **static)) or x["q"])).trace(arrays)
    assert [choice.backend for choice in explained] == ["portable"]


def _on_hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "device_capability", lambda *_: (9, 0))
    dispatch._warn_once.cache_clear()


def test_auto_takes_the_kernel_on_hopper(monkeypatch):
    _on_hopper(monkeypatch)
    decode = Case(name="decode", kind="attention", q_lens=(1, 1), kv_lens=(70, 200))
    assert ip.explain(**build(decode)).backend == "hopper"
    refused = ip.explain(**build(dataclasses.replace(decode, dtype="float32")))
    assert refused.backend == "portable"
    assert "must have dtype bfloat16 or float16 on Hopper" in refused.passed_over["hopper"]


def test_auto_takes_the_kernels_for_any_layout_and_number_of_rows(monkeypatch):
    _on_hopper(monkeypatch)
    packed = build(Case(name="packed", kind="attention", q_lens=(1, 1), kv_lens=(70, 200), layout="packed"))
    assert ip.explain(**packed).config.program == "decode"
    many_rows = build(Case(name="many_rows", kind="attention", q_lens=(100,), kv_lens=(100,)))
    assert ip.explain(**many_rows).config.program == "prefill"


@pytest.mark.parametrize("side", [2**30, 2**31 - 2, 2**31 - 1, 2**63 - 1])
def test_a_window_larger_than_any_distance_is_unlimited(side):
    call = build(Case(name="wide", kind="attention", q_lens=(5, 4), kv_lens=(3, 50)))
    for causal in (True, False):
        unlimited = ip.inkling_rel_attention(**{**call, "causal": causal, "window_size": (-1, -1)})
        chex.assert_trees_all_equal(
            ip.inkling_rel_attention(**{**call, "causal": causal, "window_size": (side, side)}), unlimited
        )


def test_max_seqlen_q_may_be_larger_than_any_batch():
    call = build(_MIXED)
    base = np.asarray(ip.inkling_rel_attention(**call), np.float64)
    assert_rows_close(ip.inkling_rel_attention(**{**call, "max_seqlen_q": 2**31 - 1}), base, limit=_LIMIT)


def test_a_plan_warns_of_the_fallback_and_the_calls_with_it_do_not(monkeypatch):
    _on_hopper(monkeypatch)
    call = build(dataclasses.replace(_MIXED, dtype="float32"))
    with pytest.warns(ip.PortableFallbackWarning, match="must have dtype bfloat16 or float16 on Hopper"):
        plan = ip.plan_batch(**call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ip.inkling_rel_attention(**call, plan=plan)
        ip.inkling_rel_attention(**call, backend="portable")
    assert "must have dtype" in ip.explain(**call, plan=plan).passed_over["hopper"]


def test_explain_names_a_card_without_a_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(attention, "device_capability", lambda *_: (8, 0))
    assert "no faster one: there is no kernel for" in str(ip.explain(**build(_MIXED)))


@pytest.mark.parametrize("nats", [14.0, 16.0, 17.4])
def test_keys_far_below_one_without_a_value_keep_their_weight_in_float16(nats):
    """Their weights are under float16's smallest number relative to the largest, and the whole of the result."""
    call = build(Case(name="sink", kind="example", q_lens=(1,), kv_lens=(260,), num_kv_heads=1, dtype="float16"))
    call["key_cache"] = np.zeros_like(call["key_cache"])
    call["rel_logits"] = np.zeros_like(call["rel_logits"])
    call["rel_logits"][..., 0] = nats
    newest = call["block_table"][0, 259 // 16]
    call["value_cache"] = np.nan_to_num(call["value_cache"])
    call["value_cache"][newest, 259 % 16] = 0
    expected, expected_lse = reference_rel_attention(**{**call, "return_lse": True})
    out, lse = ip.inkling_rel_attention(**call, out_dtype="float32", return_lse=True, backend="portable")
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-4 * np.linalg.norm(expected, axis=-1).max())
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


def test_a_bias_of_the_lowest_bfloat16_on_all_keys_is_the_mean_on_portable():
    call = build(Case(name="lowest", kind="example", q_lens=(1,), kv_lens=(33,), rel_extent=64, poison=()))
    call["rel_logits"][...] = jnp.finfo(jnp.bfloat16).min
    expected = reference_rel_attention(**call)
    assert np.abs(expected).max() > 0
    assert_rows_close(ip.inkling_rel_attention(**call, backend="portable"), expected, limit=6e-3)
