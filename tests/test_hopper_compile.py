"""The Hopper kernels lower for a GPU anywhere and compile for sm_90a without one: registers and spills."""

import dataclasses
import re
from typing import Any

import absent_card
import jax
import jax.numpy as jnp
import pytest

from inkling_pallas.core.cache_layouts import CacheDims, array_shape
from inkling_pallas.core.problem import Lengths, Operands, Problem
from inkling_pallas.core.sheared_layout import ShearedLogits
from inkling_pallas.kernels import hopper
from inkling_pallas.kernels.hopper import configs

pytestmark = pytest.mark.lowering


def make_problem(heads, kv_heads, *, batch=32, q_len=1, head_dim=128, local=False, **facts):
    extent, window = (512, 511) if local else (1024, None)
    sizes = {"num_blocks": 1000, "block_size": 128, "max_blocks": 512, "num_splits": None, "return_lse": False}
    dtype = facts.pop("dtype", "bfloat16")
    return Problem(
        num_tokens=batch * q_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        batch_size=batch,
        max_seqlen_q=q_len,
        softmax_scale=1 / head_dim,
        causal=True,
        window_left=window,
        window_right=0,
        rel_extent=facts.pop("rel_extent", extent),
        dtype=dtype,
        out_dtype=facts.pop("out_dtype", dtype),
        **(sizes | facts),
    )


def lower(problem, device=None, kernel: Any = hopper):
    """Lowers the kernels of a problem, with the config that it would get."""
    assert kernel.unsupported(problem) is None
    config = kernel.choose_config(problem)
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)

    def shape(dims, dtype=problem.dtype) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)

    p = problem
    table = ShearedLogits.shape(p.num_tokens, p.num_heads, p.rel_extent, p.dtype)
    plain = shape((p.num_tokens, p.num_heads, p.rel_extent))
    cache = shape(array_shape(p.layout, CacheDims(p.num_blocks, p.block_size, p.num_kv_heads, p.head_dim)))
    operands = Operands(
        q=shape((p.num_tokens, p.num_heads, p.head_dim)),
        key_cache=cache,
        value_cache=cache if p.layout == "separate" else None,
        block_table=shape((p.batch_size, p.max_blocks), "int32"),
        rel_logits=jax.tree.map(lambda x: shape(x.shape, x.dtype), table) if p.sheared else plain,
        out=None,
    )
    lengths = Lengths(
        cache_seqlens=shape((p.batch_size,), "int32"),
        cu_seqlens_q=shape((p.batch_size + 1,), "int32"),
        kv_offset=None,
        total_seqlens=None,
    )

    def attend(operands, lengths):
        return kernel.attend(problem, config, operands, kernel.plan(problem, config, lengths), False)

    platforms: Any = {} if device is not None else {"lowering_platforms": ("cuda",)}
    return jax.jit(attend).trace(operands, lengths).lower(**platforms)


LOWERED = {
    "global": make_problem(64, 8),
    "local, lse": make_problem(64, 16, local=True, return_lse=True),
    "clusters, local": make_problem(64, 16, batch=1, local=True),
    "one kv head, one sequence": make_problem(8, 1, batch=1),
    "clusters, group 3, head_dim 64, float32 out, lse": make_problem(
        24, 8, batch=1, q_len=2, head_dim=64, local=True, out_dtype="float32", return_lse=True
    ),
    "clusters, head_dim 256": make_problem(16, 2, batch=1, head_dim=256, local=True),
    "clusters, group 12": make_problem(24, 2, batch=1, local=True, dtype="float16"),
    "several tokens": make_problem(64, 16, q_len=4),
    "16 tokens": make_problem(64, 8, q_len=16),
    "group 3, page 16, small extent": make_problem(24, 8, block_size=16, rel_extent=8, q_len=2),
    "group 12, head_dim 64, float16": make_problem(24, 2, head_dim=64, dtype="float16"),
    "head_dim 256, page 48, splits": make_problem(16, 2, head_dim=256, block_size=48, num_splits=4),
    "no splits": make_problem(16, 2, num_splits=1),
    "packed cache": make_problem(64, 8, layout="packed"),
    "interleaved cache": make_problem(64, 16, local=True, layout="interleaved"),
    "sheared, group 3, odd extent": make_problem(24, 8, rel_extent=20, q_len=2, sheared=True),
    "sheared, 16 tokens": make_problem(64, 8, q_len=16, sheared=True),
    "sheared prefill, group 12, float16": make_problem(24, 2, q_len=64, dtype="float16", sheared=True),
    "group 2, 32 tokens, head_dim 256": make_problem(4, 2, q_len=32, head_dim=256),
    "group 7, 8 tokens, head_dim 64": make_problem(14, 2, q_len=8, head_dim=64),
    "prefill, group 3, page 16, small extent": make_problem(24, 8, batch=3, q_len=256, block_size=16, rel_extent=8),
    "prefill, group 12, head_dim 64, float16": make_problem(24, 2, q_len=64, head_dim=64, dtype="float16"),
    "prefill, group 9, lse": make_problem(18, 2, q_len=64, return_lse=True),
    "prefill, group 1, packed cache": make_problem(4, 4, q_len=512, layout="packed", local=True),
    "prefill, group 16, float32 out": make_problem(16, 1, q_len=64, out_dtype="float32"),
}


def _kernels(problem):
    config = hopper.choose_config(problem)
    if config.program == "decode":
        return _decode_kernels(problem, config)
    few = 0 if config.few_rows is None else _decode_kernels(configs.few_rows_of(problem), config.few_rows)
    return 2 + few  # One lists the tiles.


def _decode_kernels(problem, config):
    return 1 if configs.tiling_of(problem, config).whole_units else 2


@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda_on_any_machine(name):
    config = hopper.choose_config(LOWERED[name])
    assert (config.program == "decode" and config.cluster_size > 1) == ("clusters" in name)
    assert lower(LOWERED[name]).as_text().count("custom_call @mosaic_gpu") == _kernels(LOWERED[name])


@pytest.mark.parametrize("q_len", [1, 64])
def test_refuses_more_sequences_than_shared_memory_holds(q_len):
    assert hopper.unsupported(make_problem(8, 1, batch=3000, q_len=q_len)) is None
    refusal = hopper.unsupported(make_problem(8, 1, batch=9000, q_len=q_len))
    assert "batch_size must leave room for its lengths in shared memory on Hopper; got 9000." in str(refusal)


def test_refuses_what_does_not_fit_with_its_own_reason():
    long = make_problem(128, 16, batch=1024, q_len=32, block_size=128, max_blocks=2**13)
    assert hopper.unsupported(dataclasses.replace(long, batch_size=1023)) is None
    assert "must make fewer than 2**30 tiles" in str(hopper.unsupported(long))
    assert "num_heads / num_kv_heads must be at most 16" in str(hopper.unsupported(make_problem(128, 1)))
    with pytest.raises(ValueError, match="num_ctas must be a multiple of cluster_size = 2, at least that; got 131"):
        hopper.Config(program="prefill", block_kv=128, num_stages=2, num_ctas=131, cluster_size=2)
    with pytest.raises(ValueError, match="cluster_size must be 1, 2, 4 or 8; got 3"):
        hopper.Config(block_kv=64, num_stages=2, num_ctas=132, cluster_size=3)


def test_two_ctas_share_an_sm_where_units_are_many_and_short():
    many = make_problem(64, 16, batch=128, local=True)
    assert hopper.choose_config(many).num_ctas == 264
    others = {"batch_size": 32}, {"window_left": None}, {"head_dim": 256}, {"num_heads": 256}, {"num_splits": 3}
    for facts in others:
        assert hopper.choose_config(dataclasses.replace(many, **facts)).num_ctas == 132


def test_a_cta_of_one_tile_has_two_stages():
    few = dataclasses.replace(make_problem(8, 1, batch=2, local=True), window_left=2000)
    assert hopper.choose_config(few) == hopper.Config(block_kv=64, num_stages=2)
    assert hopper.choose_config(dataclasses.replace(few, batch_size=16)).num_stages > 2


@pytest.mark.parametrize(
    ("facts", "size", "block_kv"),
    [
        ({}, 8, 64),
        ({"batch_size": 2}, 4, 64),
        ({"batch_size": 4}, 2, 128),
        ({"batch_size": 8}, 1, 128),
        ({"num_splits": 3}, 2, 128),
        ({"head_dim": 64}, 4, 128),
        ({"num_tokens": 2, "max_seqlen_q": 2}, 8, 64),
        ({"num_tokens": 4, "max_seqlen_q": 4}, 4, 128),
        ({"num_tokens": 8, "max_seqlen_q": 8}, 4, 64),
        ({"num_tokens": 16, "max_seqlen_q": 16}, 1, 64),
        ({"num_tokens": 16, "max_seqlen_q": 8, "batch_size": 2}, 1, 128),
        ({"window_left": 2000}, 4, 128),
        ({"window_left": 2000, "batch_size": 2}, 1, 128),
        ({"window_left": None, "num_kv_heads": 8}, 8, 128),
        ({"window_left": None, "num_kv_heads": 8, "num_tokens": 2, "max_seqlen_q": 2}, 1, 128),
        ({"window_left": None, "num_kv_heads": 4}, 1, 128),
        ({"window_left": None, "head_dim": 64}, 1, 128),
        ({"window_left": None, "batch_size": 2}, 1, 128),
        ({"window_left": None, "batch_size": 2, "num_kv_heads": 8, "max_blocks": 8}, 8, 64),
    ],
)
def test_clusters_share_units_that_are_few_and_short_or_of_one_sequence(facts, size, block_kv):
    problem = dataclasses.replace(make_problem(64, 16, batch=1, local=True), **facts)
    config = hopper.choose_config(problem)
    assert (config.cluster_size, config.block_kv) == (size, block_kv)
    assert size == 1 or config.num_ctas == size * problem.num_kv_heads * problem.batch_size


def test_refuses_clusters_that_are_too_few_or_too_large():
    call = make_problem(64, 16, batch=1, local=True)
    with pytest.raises(ValueError, match="config must leave a cluster for each of 16 units; got 15 clusters"):
        configs.tiling_of(call, hopper.Config(block_kv=64, num_stages=2, num_ctas=60, cluster_size=4))
    with pytest.raises(ValueError, match="config must have a cluster_size of at most num_splits = 3; got 4"):
        configs.tiling_of(
            dataclasses.replace(call, num_splits=3),
            hopper.Config(block_kv=64, num_stages=2, num_ctas=64, cluster_size=4),
        )
    narrow = dataclasses.replace(call, head_dim=64)
    with pytest.raises(ValueError, match="leave each CTA of a cluster a multiple of 128 elements to merge; got 64"):
        configs.tiling_of(narrow, hopper.Config(block_kv=64, num_stages=2, num_ctas=128, cluster_size=8))


# Problem, most registers of the attention kernel, most bytes spilled.
COMPILED = {
    "global": (make_problem(64, 8), 168, 0),
    "local": (make_problem(64, 16, local=True), 168, 0),
    "local, clusters": (make_problem(64, 16, batch=1, local=True), 128, 0),
    # Two of their CTAs run on an SM.
    "short, clusters": (make_problem(64, 8, batch=2, max_blocks=8, return_lse=True), 128, 0),
    "sheared, local, clusters": (make_problem(64, 16, batch=2, local=True, sheared=True, dtype="float16"), 128, 0),
    "several tokens, local, clusters": (make_problem(64, 16, q_len=4, batch=1, local=True), 255, 0),
    "global, clusters": (make_problem(64, 8, batch=1), 168, 0),
    "local, two CTAs per SM": (make_problem(64, 16, batch=128, local=True), 128, 0),
    "several tokens, local": (make_problem(64, 16, q_len=4, local=True), 200, 0),
    "several tokens, global": (make_problem(64, 8, q_len=4), 255, 0),
    "16 tokens": (make_problem(64, 8, q_len=16), 255, 128),
    "packed cache": (make_problem(64, 8, layout="packed"), 168, 0),
    "interleaved cache": (make_problem(64, 16, local=True, layout="interleaved"), 168, 0),
    # Three warpgroups start with 168 registers a thread; the two that compute then take 232.
    "prefill, global": (make_problem(64, 8, batch=1, q_len=8192), 168, 0),
    "sheared, global": (make_problem(64, 8, sheared=True), 168, 0),
    "sheared prefill, global": (make_problem(64, 8, batch=1, q_len=8192, sheared=True), 168, 0),
    "sheared prefill, local": (make_problem(64, 16, batch=1, q_len=8192, local=True, sheared=True), 168, 0),
    "prefill, too few tiles for clusters": (make_problem(8, 1, batch=1, q_len=8192), 168, 0),
    "prefill, local": (make_problem(64, 16, batch=8, q_len=4096, local=True, return_lse=True), 168, 0),
    "mixed, group 4, page 16": (make_problem(64, 16, q_len=2048, block_size=16), 168, 0),
}


@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_sm_90a_without_spills(name, monkeypatch, capfd):
    problem, registers, spilled = COMPILED[name]
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    lower(problem, absent_card.device()).compile()
    report = "".join(capfd.readouterr())
    used = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    assert len(used) == _kernels(problem)
    assert max(used) <= registers
    assert max(spills) <= spilled


@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
@pytest.mark.parametrize(("kv_heads", "kernels"), [(4, 2), (8, 1)])
def test_lanes_wait_for_each_other_before_they_read_the_table(kv_heads, kernels, monkeypatch, capfd):
    # The interpreter has no lanes. Without the barrier a card read keys from anywhere.
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    lower(make_problem(8 * kv_heads, kv_heads, batch=1), absent_card.device()).compile()
    codes = "".join(capfd.readouterr()).split(".entry ")[1:]
    assert len(codes) == kernels
    for code in codes:
        filled = [m.end() for m in re.finditer(r"st\.shared\.\S*\s+\[__dynamic_shmem__", code)]
        assert code.find("ld.shared", filled[0]) > code.find("bar.warp.sync", filled[0]) > 0


@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
@pytest.mark.parametrize(("kv_heads", "ranks", "columns"), [(16, 8, 8), (16, 4, 32), (8, 8, 16)])
def test_a_cluster_waits_for_the_bytes_that_it_sends(kv_heads, ranks, columns, monkeypatch, capfd):
    # On the card only: it would hang if they were more, and read too early if they were fewer.
    tokens = columns * kv_heads // 64
    problem = make_problem(64, kv_heads, q_len=tokens, batch=1, local=True)
    assert hopper.choose_config(problem).cluster_size == ranks
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    lower(problem, absent_card.device()).compile()
    code = "".join(capfd.readouterr())
    places = [m.start() for m in re.finditer("st.async.shared::cluster", code)]
    assert code.index("barrier.cluster.arrive.release") < code.index("griddepcontrol.wait")
    assert code.index("barrier.cluster.wait.acquire") < places[0]
    assert places[-1] < code.index("mbarrier.try_wait.parity.acquire.cluster")
    of_lses = columns // 8  # by 4 lanes for each rank, the others by all threads
    sent = 8 * (128 * (len(places) - of_lses) + 4 * ranks * of_lses)
    assert sent == 4 * columns * (128 + ranks)
    (register,) = re.findall(r"expect_tx.shared::cta.b64 _, \[%r\d+\], (%r\d+);", code)
    assert re.findall(rf"mov.b32\s+{register}, (\d+);", code) == [str(sent)]


OVERLAPPED = {
    "global": (make_problem(64, 8, batch=1, q_len=8192), {"block_kv": 128, "num_stages": 2}),
    "local": (make_problem(64, 16, batch=1, q_len=4096, local=True), {"block_kv": 64, "num_stages": 3}),
}


@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlapped_products_compile_without_spills_and_stay_asynchronous(name, monkeypatch, capfd):
    problem, sizes = OVERLAPPED[name]
    config = dataclasses.replace(hopper.choose_config(problem), overlap=True, **sizes)
    monkeypatch.setattr(hopper, "choose_config", lambda problem: config)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    lower(problem, absent_card.device()).compile()
    report = "".join(capfd.readouterr())
    assert set(re.findall(r"(\d+) bytes spill stores", report)) == {"0"}
    assert "serialized" not in report
