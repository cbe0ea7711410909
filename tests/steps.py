"""A server's step over several layers, and what it is called with."""

from typing import Any

import absent_card
import jax
import jax.numpy as jnp
import numpy as np

import inkling_pallas as ip

LAYERS, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM, EXTENT = 3, 16, 8, 2, 64, 48
STATIC: dict[str, Any] = {"softmax_scale": 1 / 64, "causal": True, "window_size": (47, 0), "rel_extent": EXTENT}
# q_lens and kv_lens: few rows of each sequence, for the decode kernel; many of one, for the prefill kernel beside it.
BATCHES = {"decode": ((1, 1, 1), (20, 1, 33)), "mixed": ((90, 3, 1), (90, 40, 64))}


def make_step(backend: str, *, with_plan: bool = True) -> Any:
    """Returns a server's step: layers of a kind in a scan over one donated pool, with one plan."""

    def step(pool: ip.PagedKVCache, rows: jax.Array, batch: ip.Batch) -> tuple[ip.PagedKVCache, Any]:
        q_shape = jax.ShapeDtypeStruct((batch.num_tokens, HEADS, HEAD_DIM), rows.dtype)
        named: dict[str, Any] = {"backend": backend}
        plan = ip.plan_batch(q_shape, pool, None, **batch.arguments(), **STATIC, **named) if with_plan else None

        def layer(pool: ip.PagedKVCache, index_and_rows: Any) -> Any:
            index, rows = index_and_rows
            own = batch.in_layer(index, num_blocks=pool.num_blocks // LAYERS, block_size=BLOCK_SIZE)
            q, k, v, bias = jnp.split(rows, [HEADS, HEADS + KV_HEADS, HEADS + 2 * KV_HEADS], axis=1)
            pool = ip.write_kv(pool, k, v, own.slots, **named)
            call = own.arguments() | STATIC | named | {"rel_logits": bias[:, :, :EXTENT], "plan": plan}
            return pool, ip.inkling_rel_attention(q, pool, None, **call)

        return jax.lax.scan(layer, pool, (jnp.arange(LAYERS, dtype=jnp.int32), rows))

    return jax.jit(step, donate_argnums=0)


def arguments(name: str, layout: str = "packed") -> tuple[Any, ...]:
    """Returns (pool, rows, batch) of a step."""
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "block_size": BLOCK_SIZE}
    pool = ip.PagedKVCache.zeros(num_blocks=LAYERS * 18, layout=layout, **sizes)
    tables = np.random.default_rng(0).permutation(18).reshape(3, 6).tolist()
    q_lens, kv_lens = BATCHES[name]
    batch = ip.make_batch(q_lens, kv_lens, block_size=BLOCK_SIZE, block_tables=tables)
    shape = (LAYERS, batch.num_tokens, 2 * HEADS + 2 * KV_HEADS, HEAD_DIM)
    rows = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.bfloat16)
    return pool, rows, jax.device_put(batch)


def on_card(given: Any) -> Any:
    """Returns the shapes of arguments on the card that is not here."""
    card = jax.sharding.SingleDeviceSharding(absent_card.device())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=card), given)
