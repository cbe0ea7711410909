"""Run by test_sharding.py in a process with 8 forced host devices: every other check, then every other broken variant.

The argument says whether from the first on, 0, or from the second, 1. Prints one line for each: `ok NAME` or
`FAILED NAME: why`.
"""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import sys
import tempfile
import traceback
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inkling_pallas as ip
from inkling_pallas import cache_writes, relative_bias
from inkling_pallas.bench import context
from inkling_pallas.core import checked_call, dispatch
from inkling_pallas.parallel import merge as relative
from inkling_pallas.parallel import mesh as sharding
from inkling_pallas.parallel.context import ContextShards
from inkling_pallas.testing import assert_rows_close
from inkling_pallas.testing.cases import Case, build

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

MIXED = Case(
    name="mixed",
    kind="mixed",
    q_lens=(1, 3, 0, 1, 1),
    kv_lens=(61, 40, 9, 1, 0),
    padding_rows=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    block_size=4,
    rel_extent=16,
    dtype="float32",
)
LOCAL = dataclasses.replace(MIXED, name="local", window_size=(15, 0), layout="packed")
PARTS = ("block_table", "cache_seqlens")


def mesh_of(**axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto, devices=devices)


def call_of(case):
    """Returns (q, whole cache, the other arguments) of a case."""
    call = build(case)
    q, cache, values = (call.pop(name) for name in ("q", "key_cache", "value_cache"))
    cache = cache if values is None else ip.PagedKVCache.separate(cache, values)
    return q, jax.tree.map(jnp.asarray, cache), call


def judge(case, mesh, **axes):
    """Compares a case on a mesh with the oracle, output and LSE, and with one device."""
    q, whole, call = call_of(case)
    devices = ip.AttentionMesh.make(mesh, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, **axes)
    arguments, cache, shards = dict(call), whole, None
    if devices.context_axis:
        tables, lengths = (arguments.pop(name) for name in PARTS)
        shards, pages = ip.cut_context(
            tables, lengths, num_shards=devices.num_shards, block_size=case.block_size, spare_blocks=1
        )
        cache = ip.take_pages(whole, pages)
    arrays = {k: arguments.pop(k) for k in (*PARTS, "cu_seqlens_q", "rel_logits") if k in arguments}
    run = jax.jit(
        lambda q, cache, shards, arrays: devices.attend(q, cache, shards=shards, **arrays, **arguments, return_lse=True)
    )
    placed = devices.place(cache)
    operands = (q, placed, shards, arrays)
    compiled = run.lower(*operands).compile()
    out, lse = compiled(*operands)
    assert len(out.sharding.device_set) == mesh.size
    want, want_lse = ip.reference_rel_attention(q, whole, None, **call, return_lse=True)
    assert_rows_close(out, want, actual_lse=lse, expected_lse=want_lse)
    alone = ip.inkling_rel_attention(q, whole, None, **call)
    np.testing.assert_allclose(np.asarray(out), np.asarray(alone), rtol=2e-5, atol=2e-6)
    program = str(compiled.as_text())
    collectives = {name for name in ("all-reduce", "all-gather") if name in program}
    merge = "all-gather" if relative._GATHERED_BYTES else "all-reduce"
    assert collectives == (set() if devices.context_axis is None else {merge})
    assert "all-to-all" not in program
    assert "collective-permute" not in program


def check_heads_over_1_2_devices():
    judge(MIXED, mesh_of(tp=1), head_axis="tp")
    judge(LOCAL, mesh_of(tp=2), head_axis="tp")


def check_kv_heads_on_several_devices():
    for case, size in ((MIXED, 4), (LOCAL, 8)):
        judge(case, mesh_of(tp=size), head_axis="tp")


def check_context_over_1_2_3_8_devices():
    for case, size in ((LOCAL, 2), (MIXED, 1), (MIXED, 3), (MIXED, 8)):
        judge(case, mesh_of(cp=size), context_axis="cp")


def check_parts_of_many_rows_are_summed():
    with mock.patch.object(relative, "_GATHERED_BYTES", 0):
        judge(MIXED, mesh_of(cp=3), context_axis="cp")
        judge(MIXED, mesh_of(cp=2, tp=4), head_axis="tp", context_axis="cp")


def check_heads_and_context():
    judge(dataclasses.replace(MIXED, layout="interleaved"), mesh_of(tp=2, cp=4), head_axis="tp", context_axis="cp")
    judge(MIXED, mesh_of(cp=2, tp=4), head_axis="tp", context_axis="cp")  # kv heads on two devices each


def check_bfloat16():
    case = dataclasses.replace(MIXED, dtype="bfloat16")
    q, whole, call = call_of(case)
    devices = ip.AttentionMesh.make(mesh_of(cp=4), num_heads=8, num_kv_heads=2, context_axis="cp")
    shards, pages = ip.cut_context(*(call[name] for name in PARTS), num_shards=4, block_size=4)
    rest = {name: value for name, value in call.items() if name not in PARTS}
    out: Any = devices.attend(q, devices.place(ip.take_pages(whole, pages)), shards=shards, **rest)
    assert out.dtype == jnp.bfloat16
    assert_rows_close(out, ip.reference_rel_attention(q, whole, None, **call), limit=8e-3)


def check_growth_lands_on_the_last_part():
    """Decodes into sharded pools, with kv heads replicated, and into a whole one: the same outputs at each step."""
    lengths, block_size, rng = [30, 5, 0], 4, np.random.default_rng(0)
    tables = [list(range(1, 13)), list(range(13, 20)), list(range(20, 24))]

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    whole = ip.PagedKVCache.packed(normal(24, 2, 4, 32))
    devices = ip.AttentionMesh.make(mesh_of(cp=2, tp=4), num_heads=8, num_kv_heads=2, head_axis="tp", context_axis="cp")
    shards, pages = ip.cut_context(tables, lengths, num_shards=2, block_size=block_size, spare_blocks=3)
    cache = devices.place(ip.take_pages(whole, pages))
    write = jax.jit(devices.write_kv, donate_argnums=0)
    static: dict[str, Any] = {"max_seqlen_q": 1, "causal": True, "window_size": (-1, -1), "rel_extent": 8}
    static["softmax_scale"] = 1 / 16
    attend: Any = jax.jit(functools.partial(devices.attend, **static))
    first = np.asarray(shards.cache_seqlens[0])
    for _ in range(6):
        lengths = [n + 1 for n in lengths]
        shards = shards.grown(lengths)
        batch = ip.make_batch([1, 1, 1], lengths, block_size=block_size, block_tables=tables)
        k, v, q, rel_logits = normal(4, 2, 16), normal(4, 2, 16), normal(4, 8, 16), normal(4, 8, 8)
        whole = ip.write_kv(whole, k, v, batch.slots)
        slots = np.pad(shards.slots([1, 1, 1]), ((0, 0), (0, 1)), constant_values=-1)
        cache = write(cache, k, v, slots)
        cu = np.array([0, 1, 2, 3], np.int32)
        out = attend(q, cache, shards=shards, cu_seqlens_q=cu, rel_logits=rel_logits)
        args = batch.arguments() | dict(static, rel_logits=rel_logits)
        assert_rows_close(out, ip.reference_rel_attention(q, whole, None, **args))
    np.testing.assert_array_equal(shards.cache_seqlens[0], first)
    np.testing.assert_array_equal(shards.cache_seqlens.sum(0), lengths)
    assert attend._cache_size() == 1


def check_bench_context_is_green_and_can_be_red():
    sizes = "--keys 700 --batch 2 --heads 4 --kv-heads 2 --head-dim 32 --extent 64 --block-size 16 --repeats 1"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        argv = [*sizes.split(), "--devices", "4", "--out", folder]
        assert context.main(argv) == 0
        (path,) = pathlib.Path(folder).iterdir()
        result = json.loads(path.read_text())["result"]
        assert result["devices"] == 4
        assert result["speedup"] == round(result["one_us"] / result["all_us"], 3)
        assert result["margin"] > 5
        with without("kv_offset"):
            assert context.main(argv) == 1
        assert json.loads(path.read_text())["result"]["speedup"] is None


def check_a_mesh_of_explicit_axes():
    """As jax.make_mesh makes it when no type is named."""
    judge(LOCAL, jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,)), head_axis="tp")


LARGE = dataclasses.replace(MIXED, name="large", dtype="bfloat16", head_dim=64, block_size=16)


@contextlib.contextmanager
def as_on_hopper():
    """Lets every call decide as if all devices had the kernels."""
    with contextlib.ExitStack() as stack:
        for module in (dispatch, cache_writes, checked_call, relative_bias):
            stack.enter_context(mock.patch.object(module, "kernels_of", return_value=("hopper",)))
        yield


def assert_no_kernel(run, *operands):
    """Asserts that `run(backend)` is portable by "auto", with the reason, and refuses the kernel, traced and not."""
    choices = []

    def explained(*operands):
        choices.append(run("auto", *operands))
        return operands

    explained(*operands)
    jax.jit(explained)(*operands)
    assert len(choices) == 2
    for choice in choices:
        assert choice.backend == "portable"
        assert "AttentionMesh" in choice.passed_over["hopper"]
    for call in (run, lambda backend, *operands: jax.eval_shape(functools.partial(run, backend), *operands)):
        assert_names_the_mesh(call, "hopper", *operands)


def assert_names_the_mesh(call, *arguments):
    with pytest.raises(NotImplementedError, match="AttentionMesh"):
        call(*arguments)


def check_arrays_of_several_devices_take_no_kernel():
    q, whole, call = call_of(LARGE)
    new, slots = jnp.ones((1100, 2, 64), jnp.bfloat16), jnp.arange(1100, dtype=jnp.int32) % 64
    explain = lambda backend, q, cache: ip.explain(q, cache, None, **call, backend=backend)  # noqa: E731
    with as_on_hopper():
        assert explain("auto", q, whole).backend == "hopper"
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("tp",), axis_types=(kind,))
        lie = jax.sharding.NamedSharding(mesh, jax.P(None, None, "tp"))
        cache = jax.device_put(whole, lie)
        with as_on_hopper():
            assert_no_kernel(explain, q, cache)
            assert_names_the_mesh(functools.partial(ip.write_kv, backend="hopper"), cache, new, new, slots)
            spread = dataclasses.replace(LARGE, rel_extent=64)
            logits = jax.device_put(build(spread)["rel_logits"], jax.sharding.NamedSharding(mesh, jax.P(None, "tp")))
            lengths = {name: call[name] for name in ("cache_seqlens", "cu_seqlens_q")}
            assert_names_the_mesh(functools.partial(ip.shear, **lengths, backend="hopper"), logits)
            write = jax.jit(ip.write_kv, donate_argnums=0)
            written = write.lower(cache, new, new, slots).compile()
            attend = jax.jit(lambda q, cache: ip.inkling_rel_attention(q, cache, None, **call, return_lse=True))
            heads = jax.device_put(q, jax.sharding.NamedSharding(mesh, jax.P(None, "tp")))
            compiled = attend.lower(heads, cache).compile()
            out, lse = compiled(heads, cache)
        want, want_lse = ip.reference_rel_attention(q, whole, None, **call, return_lse=True)
        assert_rows_close(out, want, actual_lse=lse, expected_lse=want_lse, limit=8e-3)
        assert "all-gather" not in str(compiled.as_text())
        assert "all-gather" not in str(written.as_text())
        want = ip.write_kv(whole, new[:64], new[:64], slots[:64])
        got = written(cache, new, new, slots)
        for mine, theirs in zip(got.arrays, want.arrays, strict=True):
            np.testing.assert_array_equal(np.asarray(mine).astype(np.float32), np.asarray(theirs).astype(np.float32))
    # What the in_shardings of a jit say is known when it is lowered.
    lie = jax.sharding.NamedSharding(mesh_of(tp=2), jax.P(None, None, "tp"))
    write = jax.jit(functools.partial(ip.write_kv, backend="hopper"), in_shardings=(lie, None, None, None))
    traced = write.trace(whole, new, new, slots)
    assert_names_the_mesh(lambda: traced.lower(lowering_platforms=("cuda",)))


def check_a_context_mesh_takes_no_kernel_but_inside_shard_map():
    q, whole, call = call_of(LARGE)
    explain = lambda backend, q, cache: ip.explain(q, cache, None, **call, backend=backend)  # noqa: E731
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        with as_on_hopper(), jax.set_mesh(jax.make_mesh((2,), ("tp",), axis_types=(kind,))):
            assert_no_kernel(explain, q, whole)
    for axes, backend in (({"a", "b"}, "hopper"), ({"a"}, "portable")):
        taken = []

        def inside(q, cache, taken=taken):
            taken.append(explain("auto", q, cache).backend)
            return q

        with as_on_hopper():
            run = functools.partial(jax.shard_map, axis_names=axes, check_vma=False, mesh=mesh_of(a=2, b=2))
            jax.jit(run(inside, in_specs=jax.P(), out_specs=jax.P()))(q, whole)
        assert taken == [backend]


def check_a_context_mesh_is_that_of_the_attention_mesh_or_named():
    explicit = functools.partial(jax.make_mesh, axis_types=(jax.sharding.AxisType.Explicit,))
    mesh = explicit((2,), ("tp",))
    with jax.set_mesh(mesh):
        judge(LOCAL, mesh, head_axis="tp")
    mesh = explicit((8,), ("tp",))  # more than kv heads: its AttentionMesh has two axes
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"'tp_copies': 4}; got {'tp': 8}. Name its `mesh`"):
        judge(LOCAL, mesh, head_axis="tp")
    mesh = jax.make_mesh((2, 4), ("cp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    axes = {"head_axis": "tp", "context_axis": "cp"}
    with jax.set_mesh(ip.AttentionMesh.make(mesh, num_heads=8, num_kv_heads=2, **axes).mesh):
        judge(MIXED, mesh, **axes)


def check_inside_a_shard_map_over_another_axis():
    q, whole, call = call_of(LOCAL)
    mesh = mesh_of(dp=2, tp=2)
    devices = ip.AttentionMesh.make(mesh, num_heads=8, num_kv_heads=2, head_axis="tp")
    arrays = {name: call.pop(name) for name in list(call) if hasattr(call[name], "dtype")}

    def layer(q, cache, arrays):
        out: Any = devices.attend(q[0], cache, **arrays, **call)
        return out[None]

    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(jax.P("dp"), jax.P(), jax.P()), out_specs=jax.P("dp"))
    two = jnp.stack([q, -q])
    out = np.asarray(jax.jit(over(layer, axis_names={"dp"}, check_vma=False))(two, whole, arrays))
    for got, q in zip(out, two, strict=True):
        want = ip.reference_rel_attention(q, whole, None, **arrays, **call)
        assert_rows_close(got, want)
    with pytest.raises(ValueError, match="must leave axis tp to AttentionMesh"):
        jax.jit(over(layer, check_vma=False)).trace(two, whole, arrays)


def unweighted(out, lse, axis):
    return jax.lax.pmean(out, axis), jax.lax.pmax(lse, axis)


def own_part_only(out, lse, axis):
    return out, lse


def without(name):
    arguments = ContextShards.arguments
    return mock.patch.object(ContextShards, "arguments", lambda self: {**arguments(self), name: None})


def wrong_kv_heads():
    """Cuts the kv heads over the axis that should hold copies of one."""
    spec = lambda self, layout: jax.sharding.PartitionSpec(None, None, self.head_axes[1], None)  # noqa: E731
    return mock.patch.object(ip.AttentionMesh, "_cache_spec", spec)


def all_slots_to_the_first_part():
    slots = ContextShards.slots
    return mock.patch.object(ContextShards, "slots", lambda self, q: np.roll(slots(self, q), 1, axis=0))


BROKEN = {
    "parts averaged": (
        lambda: mock.patch.object(sharding, "merge_over_axis", unweighted),
        "context_over_1_2_3_8_devices",
    ),
    "parts not merged": (lambda: mock.patch.object(sharding, "merge_over_axis", own_part_only), "heads_and_context"),
    "no kv_offset": (lambda: without("kv_offset"), "context_over_1_2_3_8_devices"),
    "no total_seqlens": (lambda: without("total_seqlens"), "context_over_1_2_3_8_devices"),
    "kv heads of another group": (wrong_kv_heads, "kv_heads_on_several_devices"),
    "new keys in the first part": (all_slots_to_the_first_part, "growth_lands_on_the_last_part"),
}


def main(first, broken_too):
    checks = {name.removeprefix("check_"): run for name, run in globals().items() if name.startswith("check_")}
    for name, run in list(checks.items())[first::2]:
        try:
            run()
            print(f"ok {name}", flush=True)
        except Exception:
            print(f"FAILED {name}: {traceback.format_exc()}", flush=True)
    for name, (broken, check) in list(BROKEN.items())[first::2] if broken_too else ():
        with broken():
            try:
                checks[check]()
                print(f"FAILED {name}: {check} does not notice", flush=True)
            except AssertionError:
                print(f"ok {name}", flush=True)


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    main(int(sys.argv[1]), "broken" in sys.argv[2:])
