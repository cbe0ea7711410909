"""What XLA makes of a step on an H200, compiled here without one: no copy of a cache in any layout."""

import math
import re
from typing import Any

import absent_card
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import inkling_pallas as ip
from inkling_pallas.core.cache_layouts import LAYOUTS

LAYERS, PAGES, ROWS = 2, 20_000, 32
BUCKETS = ip.Buckets(num_tokens=(ROWS,), batch_size=(2,), max_seqlen_q=(ROWS,), max_blocks=(64,))


@pytest.fixture(scope="module")
def card() -> SingleDeviceSharding:
    if absent_card.missing():
        pytest.skip(f"no compile for a card: {absent_card.missing()}")
    return SingleDeviceSharding(absent_card.device())


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
