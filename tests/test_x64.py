"""`jax_enable_x64` changes nothing: public functions and kernels compute in the types that they have without it."""

import functools
from typing import Any

import chex
import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered import kernels_in, lower, make_problem

import inkling_pallas as ip
from inkling_pallas.kernels import blackwell, hopper
from inkling_pallas.testing import catalog, judge
from inkling_pallas.testing.cases import Case, build


@pytest.fixture(autouse=True)
def x64():
    # For all threads, of which the interpreter has some.
    jax.config.update("jax_enable_x64", True)
    assert jnp.ones(1).dtype == jnp.float64
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.small
@pytest.mark.optimized
@pytest.mark.parametrize("case", catalog.small_cases(), ids=lambda case: case.name)
def test_a_small_case(case):
    verdict = judge.judge(case, backend="portable")
    assert not verdict.red, verdict.failure
    assert verdict.margin >= judge.MIN_MARGIN


CALL = build(Case(name="x64", kind="", q_lens=(5, 1, 3), kv_lens=(70, 40, 33), rel_extent=16, window_size=(20, 0)))
LENGTHS = {name: CALL[name] for name in ("cu_seqlens_q", "cache_seqlens")}


def attend(**changes) -> Any:
    return ip.inkling_rel_attention(**CALL | changes)


def in_scan(call):
    """Returns two layers of a step, that share a plan, as `jax.lax.scan` runs them."""
    plan = ip.plan_batch(**call)
    layers = jax.tree.map(lambda x: jnp.stack([x, x]), {name: call[name] for name in ("q", "rel_logits")})
    return jax.lax.scan(lambda carry, layer: (carry, attend(**layer, plan=plan)), 0, layers)[1]


def over_axis(**axis):
    """Returns a step over a mesh of one device, its heads or the parts of its sequences along the axis."""
    (name,) = axis.values()
    mesh = jax.make_mesh((1,), (name,), axis_types=(jax.sharding.AxisType.Auto,))
    devices = ip.AttentionMesh.make(mesh, num_heads=8, num_kv_heads=CALL["key_cache"].shape[2], **axis)
    call, size = dict(CALL), CALL["key_cache"].shape[1]
    cache = ip.PagedKVCache.separate(call.pop("key_cache"), call.pop("value_cache"))
    if "head_axis" in axis:
        return devices.attend(call.pop("q"), devices.place(cache), **call)
    table, lengths = call.pop("block_table"), call.pop("cache_seqlens").tolist()
    tables = [row[: -(-n // size)].tolist() for row, n in zip(table, lengths, strict=True)]
    shards, pages = ip.cut_context(tables, lengths, num_shards=1, block_size=size)
    return devices.attend(call.pop("q"), devices.place(ip.take_pages(cache, pages)), shards=shards, **call)


def written():
    batch = ip.make_batch([3, 1], [3, 20], block_size=16)
    cache = ip.PagedKVCache.zeros(num_blocks=4, block_size=16, num_kv_heads=2, head_dim=64)
    rows: Any = np.random.default_rng(0).standard_normal((batch.num_tokens, 2, 64)).astype(jnp.bfloat16)
    return ip.write_kv(cache, rows, rows, batch.slots).arrays


def biases():
    draw = np.random.default_rng(0)
    drawn: Any = (draw.standard_normal(shape).astype(jnp.bfloat16) for shape in ((9, 8, 16), (16, 16)))
    r, proj = drawn
    tau = ip.log_scaling(jnp.arange(9, dtype=jnp.int32) * 1000, n_floor=64)
    table = ip.relative_logits(r, proj, tau)
    sheared = ip.shear(table, **LENGTHS)
    return tau, table, sheared, ip.sheared_relative_logits(r, proj, tau, **LENGTHS), attend(rel_logits=sheared)


FUNCTIONS = {
    "the operator": lambda: attend(return_lse=True, out_dtype=jnp.float32),
    "jit, splits": lambda: jax.jit(functools.partial(attend, num_splits=3))(),
    "a plan in a scan": lambda: in_scan(CALL),
    "parts": lambda: ip.merge_partials([attend(), attend()], [jnp.zeros((9, 8), jnp.float32)] * 2),
    "heads over a mesh": lambda: over_axis(head_axis="tp"),
    "parts over a mesh": lambda: over_axis(context_axis="cp"),
    "write_kv": written,
    "the bias": biases,
    "int64 of NumPy": lambda: attend(**{name: x.astype(np.int64) for name, x in LENGTHS.items()}),
}


# On the second jax only those that have code of their own.
ON_ONE_JAX = {"jit, splits", "parts", "heads over a mesh", "int64 of NumPy"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.full] * (x in ON_ONE_JAX)) for x in FUNCTIONS])
def test_a_function_gives_the_same_bits_and_dtypes(name):
    given = FUNCTIONS[name]()
    jax.config.update("jax_enable_x64", False)
    without = FUNCTIONS[name]()
    chex.assert_trees_all_equal_shapes_and_dtypes(given, without)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, given), jax.tree.map(np.asarray, without))


PREFILL: Any = {"q_len": 256, "batch": 3}
PROBLEMS = {
    "decode": (hopper, make_problem(24, 8, num_splits=4)),
    "clusters": (hopper, make_problem(64, 8, batch=1, local=True, return_lse=True)),
    "sheared decode": (hopper, make_problem(64, 16, q_len=4, local=True, sheared=True)),
    "mixed": (hopper, make_problem(64, 8, **PREFILL, return_lse=True)),
    "sheared prefill": (hopper, make_problem(24, 8, **PREFILL, sheared=True, layout="packed")),
    "tcgen05 prefill": (blackwell, make_problem(64, 8, **PREFILL, sheared=True)),
    "tcgen05 decode": (blackwell, make_problem(64, 8)),
}


@pytest.mark.lowering
@pytest.mark.host
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_kernel_lowers(name):
    kernel, problem = PROBLEMS[name]
    assert kernels_in(lower(problem, kernel=kernel)) >= 1


@pytest.mark.lowering
def test_the_kernels_around_it_lower():
    cache = jax.eval_shape(lambda: ip.PagedKVCache.zeros(num_blocks=64, block_size=16, num_kv_heads=8, head_dim=128))
    rows, table = (jax.ShapeDtypeStruct((2048, *shape), jnp.bfloat16) for shape in ((8, 128), (8, 64)))
    lengths = {
        name: jax.ShapeDtypeStruct((n,), jnp.int32) for name, n in {"cu_seqlens_q": 4, "cache_seqlens": 3}.items()
    }
    r, proj = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 8, 16), (16, 64)))
    slots, tau = (jax.ShapeDtypeStruct((2048,), dtype) for dtype in (jnp.int32, jnp.float32))
    for function, arguments, keywords in (
        (ip.write_kv, (cache, rows, rows, slots), {}),
        (ip.shear, (table,), lengths),
        (ip.sheared_relative_logits, (r, proj, tau), lengths),
    ):
        named = functools.partial(function, backend="hopper")
        traced = jax.jit(named).trace(*arguments, **keywords)
        assert kernels_in(traced.lower(lowering_platforms=("cuda",))) == 1


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("kernel", "config"),
    [(hopper, hopper.Config(block_kv=64, num_stages=2, num_ctas=2, program=x)) for x in ("decode", "prefill")]
    + [(blackwell, blackwell.Config(num_stages=2, num_ctas=2))],
    ids=["decode", "prefill", "tcgen05"],
)
def test_a_kernel_computes(kernel, config, capfd):
    case = Case(name="x64", kind="", q_lens=(3, 1), kv_lens=(90, 40), num_heads=8, num_kv_heads=1, rel_extent=64)
    call = build(case)
    run = interpreted.compiled(call, config, kernel=kernel)
    interpreted.assert_right(run(call), call, capfd, interpreted.LIMITS["bfloat16"])
