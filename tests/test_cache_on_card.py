"""What XLA makes of a step on an H200, compiled here without one: no copy of a cache in any layout."""

import importlib.util
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import inkling_pallas as ip
from inkling_pallas.layouts import LAYOUTS

H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } device_description_str: "NVIDIA H200"
"""
LAYERS, PAGES, ROWS = 2, 20_000, 32
BUCKETS = ip.Buckets(num_tokens=(ROWS,), batch_size=(2,), max_seqlen_q=(ROWS,), max_blocks=(64,))


@pytest.fixture(scope="module")
def card() -> SingleDeviceSharding:
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("needs jax-cuda13-plugin to compile for a card")
    topology = topologies.get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1")
    return SingleDeviceSharding(topology.devices[0])


def step(pool: ip.PagedKVCache, rows: jax.Array, batch: ip.Batch, *, copy_first: bool) -> Any:
    """Writes and attends layer by layer, all in one pool."""
    kv_heads = pool.num_kv_heads

    def layer(pool: ip.PagedKVCache, index_and_rows: Any) -> Any:
        index, rows = index_and_rows
        own = batch.in_layer(index, num_blocks=PAGES, block_size=16)
        k, v, q = jnp.split(rows, [kv_heads, 2 * kv_heads], axis=1)
        pool = ip.write_kv(pool, k, v, own.slots)
        static: dict[str, Any] = {"softmax_scale": 1 / 128, "causal": True, "window_size": (-1, -1), "rel_extent": 128}
        read = pool.copy_to("separate") if copy_first else pool
        call = own.arguments() | static | {"rel_logits": q, "backend": "portable"}
        return pool, ip.inkling_rel_attention(q, read, None, **call)

    return jax.lax.scan(layer, pool, (jnp.arange(LAYERS, dtype=jnp.int32), rows))


def compiled_for(card: SingleDeviceSharding, layout: str, *, kv_heads: int = 1, copy_first: bool = False) -> Any:
    """Compiles a step over a donated pool of 40,000 pages."""
    pool = {"num_blocks": LAYERS * PAGES, "block_size": 16, "num_kv_heads": kv_heads, "head_dim": 128}
    cache = jax.eval_shape(lambda: ip.PagedKVCache.zeros(**pool, layout=layout))
    rows = jax.ShapeDtypeStruct((LAYERS, ROWS, 2 * kv_heads + 8, 128), jnp.bfloat16)
    arguments = (cache, rows, ip.make_batch([30, 1], [200, 600], block_size=16, buckets=BUCKETS))
    on_card = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=card), arguments)
    jitted = jax.jit(step, donate_argnums=0, static_argnames="copy_first")
    return jitted.lower(*on_card, copy_first=copy_first).compile()


def copies(compiled: Any, elements: int) -> list[str]:
    """Returns the instructions of a compiled module that move so many elements: copies and transposes, also fused."""
    found = re.findall(r"= [a-z0-9]+\[([\d,]*)\]\S* (copy|transpose|copy-start)\(", compiled.as_text())
    return [op for dims, op in found if math.prod(int(n) for n in dims.split(",") if n) >= elements]


@pytest.mark.lowering
@pytest.mark.full
@pytest.mark.parametrize(("layout", "kv_heads"), [*((layout, 1) for layout in LAYOUTS), ("packed", 2)])
def test_a_step_on_a_card_copies_no_cache(card, layout, kv_heads):
    compiled = compiled_for(card, layout, kv_heads=kv_heads)
    keys = LAYERS * PAGES * 16 * kv_heads * 128
    memory = compiled.memory_analysis()
    assert copies(compiled, keys) == []
    assert memory.alias_size_in_bytes >= 2 * 2 * keys  # K and V of two bytes each
    assert memory.temp_size_in_bytes < keys


@pytest.mark.lowering
@pytest.mark.full
def test_a_step_on_a_card_that_copies_is_caught(card):
    compiled = compiled_for(card, "packed", copy_first=True)
    assert compiled.memory_analysis().temp_size_in_bytes > LAYERS * PAGES * 16 * 128
