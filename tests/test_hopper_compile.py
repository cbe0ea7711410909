"""The Hopper kernels lower for a GPU anywhere and compile for sm_90a without one: registers and spills."""

import importlib.util
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from inkling_pallas.kernels import hopper
from inkling_pallas.layouts import CacheDims, array_shape
from inkling_pallas.problem import Operands, Problem, Sequences

pytestmark = pytest.mark.lowering

# What XLA asks of a compile-only device; the sizes are those of a Hopper card with 132 SMs.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""


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


def lower(problem, device=None):
    """Lowers the kernels of a problem, with the config that it would get."""
    assert hopper.unsupported(problem) is None
    config = hopper.choose_config(problem)
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)

    def shape(dims, dtype=problem.dtype) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)

    p = problem
    cache = shape(array_shape(p.layout, CacheDims(p.num_blocks, p.block_size, p.num_kv_heads, p.head_dim)))
    operands = Operands(
        q=shape((p.num_tokens, p.num_heads, p.head_dim)),
        key_cache=cache,
        value_cache=cache if p.layout == "separate" else None,
        block_table=shape((p.batch_size, p.max_blocks), "int32"),
        rel_logits=shape((p.num_tokens, p.num_heads, p.rel_extent)),
        out=None,
    )
    sequences = Sequences(*[shape((p.batch_size,), "int32")] * 4)

    def attend(operands, sequences):
        plan = hopper.plan(problem, config, sequences)
        return hopper.attend(problem, config, operands, sequences, plan, False)

    platforms: Any = {} if device is not None else {"lowering_platforms": ("cuda",)}
    return jax.jit(attend).trace(operands, sequences).lower(**platforms)


LOWERED = {
    "global": make_problem(64, 8),
    "local, lse": make_problem(64, 16, local=True, return_lse=True),
    "one kv head, one sequence": make_problem(8, 1, batch=1),
    "several tokens": make_problem(64, 16, q_len=4),
    "16 tokens": make_problem(64, 8, q_len=16),
    "group 3, page 16, small extent": make_problem(24, 8, block_size=16, rel_extent=8, q_len=2),
    "group 12, head_dim 64, float16": make_problem(24, 2, head_dim=64, dtype="float16"),
    "head_dim 256, page 48, splits": make_problem(16, 2, head_dim=256, block_size=48, num_splits=4),
    "no splits": make_problem(16, 2, num_splits=1),
    "packed cache": make_problem(64, 8, layout="packed"),
    "interleaved cache": make_problem(64, 16, local=True, layout="interleaved"),
    "prefill, group 3, page 16, small extent": make_problem(24, 8, batch=3, q_len=256, block_size=16, rel_extent=8),
    "prefill, group 12, head_dim 64, float16": make_problem(24, 2, q_len=64, head_dim=64, dtype="float16"),
    "prefill, group 9, lse": make_problem(18, 2, q_len=64, return_lse=True),
    "prefill, group 1, packed cache": make_problem(4, 4, q_len=512, layout="packed", local=True),
    "prefill, group 16, float32 out": make_problem(16, 1, q_len=64, out_dtype="float32"),
}


def _kernels(problem):
    config, decode = hopper.choose_config(problem), 1 if problem.num_splits == 1 else 2
    return decode if config.program == "decode" else 1 + (0 if config.few_rows is None else decode)


@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda_on_any_machine(name):
    assert lower(LOWERED[name]).as_text().count("custom_call @mosaic_gpu") == _kernels(LOWERED[name])


def _missing():
    """Returns what a compile without a card lacks here, or None."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "jax-cuda13-plugin is not installed"
    return None if shutil.which("ptxas") else "there is no ptxas on PATH"


# Problem, most registers of the attention kernel, most bytes spilled.
COMPILED = {
    "global": (make_problem(64, 8), 168, 0),
    "local": (make_problem(64, 16, local=True), 168, 0),
    "several tokens, local": (make_problem(64, 16, q_len=4, local=True), 200, 0),
    "several tokens, global": (make_problem(64, 8, q_len=4), 255, 0),
    "16 tokens": (make_problem(64, 8, q_len=16), 255, 128),
    "packed cache": (make_problem(64, 8, layout="packed"), 168, 0),
    "interleaved cache": (make_problem(64, 16, local=True, layout="interleaved"), 168, 0),
    # Three warpgroups start with 168 registers a thread; the two that compute then take 232.
    "prefill, global": (make_problem(64, 8, batch=1, q_len=8192), 168, 0),
    "prefill, local": (make_problem(64, 16, batch=8, q_len=4096, local=True, return_lse=True), 168, 0),
    "mixed, group 4, page 16": (make_problem(64, 16, q_len=2048, block_size=16), 168, 0),
}


@pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_sm_90a_without_spills(name, monkeypatch, capfd):
    problem, registers, spilled = COMPILED[name]
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    topology = topologies.get_topology_desc("", platform="cuda", target_config=TARGET, topology="1x1x1")
    lower(problem, topology.devices[0]).compile()
    report = "".join(capfd.readouterr())
    used = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    assert len(used) == _kernels(problem)
    assert max(used) <= registers
    assert max(spills) <= spilled
