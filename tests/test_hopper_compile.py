"""The Hopper kernels lower for a GPU anywhere and compile for sm_90a without one: registers and spills."""

import dataclasses
import re

import absent_card
import pytest
from lowered import compiled, kernels_in, lower, make_problem

from inkling_pallas.kernels import hopper
from inkling_pallas.kernels.hopper import configs

pytestmark = pytest.mark.lowering
NEEDS_PTXAS = pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))

# Lowered without a card. Those of COMPILED below are lowered for the card on the way.
LOWERED = {
    "one kv head, one sequence": make_problem(8, 1, batch=1),
    "clusters, group 3, head_dim 64, float32 out, lse": make_problem(
        24, 8, batch=1, q_len=2, head_dim=64, local=True, out_dtype="float32", return_lse=True
    ),
    "clusters, head_dim 256": make_problem(16, 2, batch=1, head_dim=256, local=True),
    "clusters, group 12": make_problem(24, 2, batch=1, local=True, dtype="float16"),
    "group 3, page 16, small extent": make_problem(24, 8, block_size=16, rel_extent=8, q_len=2),
    "group 12, head_dim 64, float16": make_problem(24, 2, head_dim=64, dtype="float16"),
    "head_dim 256, page 48, splits": make_problem(16, 2, head_dim=256, block_size=48, num_splits=4),
    "no splits": make_problem(16, 2, num_splits=1),
    "sheared, group 3, odd extent": make_problem(24, 8, rel_extent=20, q_len=2, sheared=True),
    "sheared, 16 tokens": make_problem(64, 8, q_len=16, sheared=True),
    "sheared prefill, group 12, float16": make_problem(24, 2, q_len=64, dtype="float16", sheared=True),
    "group 2, 32 tokens, head_dim 256": make_problem(4, 2, q_len=32, head_dim=256),
    "group 7, 8 tokens, head_dim 64": make_problem(14, 2, q_len=8, head_dim=64),
    "prefill, group 3, page 16, small extent": make_problem(24, 8, batch=3, q_len=256, block_size=16, rel_extent=8),
    "prefill, group 12, head_dim 64, float16": make_problem(24, 2, q_len=64, head_dim=64, dtype="float16"),
    "prefill, group 9, lse, float32 out": make_problem(18, 2, q_len=64, return_lse=True, out_dtype="float32"),
    "prefill, group 1, packed cache": make_problem(4, 4, q_len=512, layout="packed", local=True),
}
# Of these the second jax lowers few, beside those of ANYWHERE.
ON_BOTH = ("clusters, group 12", "sheared, group 3, odd extent", "prefill, group 3, page 16, small extent")


# Problem, most registers of the attention kernel, most bytes spilled.
COMPILED = {
    "global": (make_problem(64, 8), 168, 0),
    "local, lse": (make_problem(64, 16, local=True, return_lse=True), 168, 0),
    "local, clusters": (make_problem(64, 16, batch=1, local=True), 128, 0),
    # Two of their CTAs run on an SM.
    "short, clusters": (make_problem(64, 8, batch=2, max_blocks=8, return_lse=True), 128, 0),
    "sheared, local, clusters": (make_problem(64, 16, batch=2, local=True, sheared=True, dtype="float16"), 128, 0),
    "several tokens, local, clusters": (make_problem(64, 16, q_len=8, batch=1, local=True), 255, 0),
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
    "prefill, too few tiles to share": (make_problem(8, 1, batch=1, q_len=8192), 168, 0),
    "prefill, local": (make_problem(64, 16, batch=8, q_len=4096, local=True, return_lse=True), 168, 0),
    "mixed, group 4, page 16": (make_problem(64, 16, q_len=2048, block_size=16), 168, 0),
}
# Lowered, too, where nothing can be compiled.
ANYWHERE = ("global", "local, lse", "local, clusters", "several tokens, global", "interleaved cache")


def _kernels(problem):
    config = hopper.choose_config(problem)
    if config.program == "decode":
        return _decode_kernels(problem, config)
    few = 0 if config.few_rows is None else _decode_kernels(configs.few_rows_of(problem), config.few_rows)
    return 2 + few  # One lists the tiles.


def _decode_kernels(problem, config):
    return 1 if configs.tiling_of(problem, config).whole_units else 2


def assert_clusters_are_named(name, problem):
    config = hopper.choose_config(problem)
    assert (config.program == "decode" and config.cluster_size > 1) == ("clusters" in name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ON_BOTH else pytest.mark.full) for name in LOWERED]
    + list(ANYWHERE if absent_card.missing() else ()),
)
def test_lowers_for_cuda_on_any_machine(name):
    problem = LOWERED[name] if name in LOWERED else COMPILED[name][0]
    assert_clusters_are_named(name, problem)
    assert kernels_in(lower(problem)) == _kernels(problem)


def test_a_single_cta_leaves_nothing_to_merge():
    config = hopper.Config(block_kv=64, num_stages=2, num_ctas=1)
    assert kernels_in(lower(LOWERED["one kv head, one sequence"], config=config)) == 1


@NEEDS_PTXAS
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_sm_90a_without_spills(name):
    problem, registers, spilled = COMPILED[name]
    assert_clusters_are_named(name, problem)
    done = compiled(problem)
    assert done.lowered_kernels == len(done.registers) == _kernels(problem)
    assert max(done.registers) <= registers
    assert max(done.spilled) <= spilled


@NEEDS_PTXAS
@pytest.mark.parametrize(("kv_heads", "kernels"), [(4, 2), (8, 1)])
def test_lanes_wait_for_each_other_before_they_read_the_table(kv_heads, kernels):
    # The interpreter has no lanes. Without the barrier a card read keys from anywhere.
    codes = compiled(make_problem(8 * kv_heads, kv_heads, batch=1)).codes
    assert len(codes) == kernels
    for code in codes:
        filled = [m.end() for m in re.finditer(r"st\.shared\.\S*\s+\[__dynamic_shmem__", code)]
        assert code.find("ld.shared", filled[0]) > code.find("bar.warp.sync", filled[0]) > 0


@NEEDS_PTXAS
@pytest.mark.parametrize(("kv_heads", "ranks", "columns"), [(16, 8, 8), (16, 4, 32), (8, 8, 16)])
def test_a_cluster_waits_for_the_bytes_that_it_sends(kv_heads, ranks, columns):
    # On the card only: it would hang if they were more, and read too early if they were fewer.
    tokens = columns * kv_heads // 64
    problem = make_problem(64, kv_heads, q_len=tokens, batch=1, local=True)
    assert hopper.choose_config(problem).cluster_size == ranks
    code = compiled(problem).report
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


@NEEDS_PTXAS
@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlapped_products_compile_without_spills_and_stay_asynchronous(name):
    problem, sizes = OVERLAPPED[name]
    chosen = hopper.choose_config(problem)
    config = dataclasses.replace(chosen, overlap=True, **sizes)
    done = compiled(problem, None if config == chosen else config)
    assert set(done.spilled) == {0}
    assert "serialized" not in done.report
