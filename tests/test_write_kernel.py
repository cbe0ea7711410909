"""The kernel of write_kv: interpreted against a loop over tokens, and compiled for an H200 that is not here."""

import re
from collections.abc import Callable
from typing import Any

import absent_card
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from writes import aliased_outputs, written_by_hand

import inkling_pallas as ip
from inkling_pallas.core.cache_layouts import LAYOUTS
from inkling_pallas.core.dispatch import kernels_of
from inkling_pallas.kernels import write_kv as kernel

POOL = (4, 8, 2, 64)  # blocks, tokens of a block, heads, head_dim


def written(layout: str, pool: tuple[int, ...] = POOL, dtype: Any = jnp.bfloat16) -> tuple[list[Any], list[Any]]:
    """Returns what the kernel and what a loop left in (keys, values); skipped slots of every kind are among them."""
    rng = np.random.default_rng(0)
    keys, values = jnp.asarray(rng.standard_normal((2, *pool)), dtype)
    cache = ip.PagedKVCache.separate(keys, values).copy_to(layout)
    capacity = pool[0] * pool[1]
    skipped = [-1, capacity, -capacity, capacity + 1, 2**31 - 1, -(2**31)]
    slots = rng.permutation(np.concatenate([rng.permutation(capacity)[:13], skipped])).astype(np.int32)
    k, v = jnp.asarray(rng.standard_normal((2, len(slots), *pool[2:])), dtype)
    writing = kernel.describe(cache.arrays, layout, len(slots))
    assert kernel.unsupported(writing) is None
    interpreter = plgpu.InterpretGPUParams(detect_races=True)
    arrays = kernel.write(writing, cache.arrays, k, v, jnp.asarray(slots), interpreter)
    got = ip.PagedKVCache(arrays=arrays, layout=layout).copy_to("separate").arrays
    return list(map(np.asarray, got)), written_by_hand(cache, np.asarray(k), np.asarray(v), slots)


def same(got: list[Any], wanted: list[Any]) -> bool:
    return all((a == b).all() for a, b in zip(got, wanted, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("many_ctas", [kernel._MANY_CTAS, 2])  # runs of one token and of five
def test_the_kernel_writes_what_a_loop_over_tokens_would(layout, many_ctas, monkeypatch, capfd):
    monkeypatch.setattr(kernel, "_MANY_CTAS", many_ctas)
    assert same(*written(layout))
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.interpreter
def test_the_kernel_writes_float32_and_one_head():
    assert same(*written("packed", pool=(3, 16, 1, 32), dtype=jnp.float32))


def _moved(change: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    slot_of: Any = kernel._slot_of
    return lambda refs, values, page, offset, writing: slot_of(refs, *change(values, page, offset), writing)


BROKEN = {
    "K and V swapped": _moved(lambda values, page, offset: (not values, page, offset)),
    "page ignored": _moved(lambda values, page, offset: (values, 0 * page, offset)),
    "offset off by one": _moved(lambda values, page, offset: (values, page, jnp.minimum(offset + 1, POOL[1] - 1))),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_caught(name, monkeypatch):
    monkeypatch.setattr(kernel, "_slot_of", BROKEN[name])
    assert not same(*written("packed"))


@pytest.mark.interpreter
def test_write_kv_runs_the_kernel_that_is_named_under_jit_and_vmap():
    cache = ip.PagedKVCache.zeros(num_blocks=2, block_size=8, num_kv_heads=1, head_dim=64)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    k = jnp.arange(1, 5, dtype=jnp.bfloat16).reshape(2, 2, 1, 1) * jnp.ones((1, 1, 1, 64), jnp.bfloat16)
    slots = jnp.array([9, -1], jnp.int32)

    @jax.jit
    @jax.vmap
    def write(cache: ip.PagedKVCache, k: jax.Array) -> ip.PagedKVCache:
        return ip.write_kv(cache, k, -k, slots, backend="hopper", interpret=True)

    keys, values = write(stacked, k).arrays
    assert keys[:, 1, 1, 0, 0].tolist() == [1, 3]
    assert values.astype(jnp.float32).sum().tolist() == -64 * 4


def shapes(layout: str, heads: int, steps: tuple[int, ...] = (), **facts: Any) -> tuple[Any, ...]:
    """Returns the shapes of a write of 8,192 tokens, or of several."""
    pool = {"num_blocks": 2048, "block_size": 16, "num_kv_heads": heads, "head_dim": 128} | facts
    cache = jax.eval_shape(lambda: ip.PagedKVCache.zeros(**pool, layout=layout))
    rows = jax.ShapeDtypeStruct((*steps, 8192, heads, 128), jnp.bfloat16)
    return cache, rows, rows, jax.ShapeDtypeStruct((*steps, 8192), jnp.int32)


def steps_of_kernel(cache: ip.PagedKVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> ip.PagedKVCache:
    """Writes step after step with the kernel, the cache being the carry."""

    def step(cache: ip.PagedKVCache, new: tuple[jax.Array, ...]) -> tuple[ip.PagedKVCache, None]:
        return ip.write_kv(cache, *new, backend="hopper"), None

    return jax.lax.scan(step, cache, (k, v, slots))[0]


def compiled_for_card(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if absent_card.missing():
        pytest.skip(f"no compile for a card: {absent_card.missing()}")
    card = jax.sharding.SingleDeviceSharding(absent_card.device())
    on_card = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=card), arguments)
    return jax.jit(function, donate_argnums=0).lower(*on_card).compile()


@pytest.mark.lowering
@pytest.mark.parametrize(("layout", "heads"), [*((layout, 8) for layout in LAYOUTS), ("packed", 1)])
def test_the_kernel_writes_in_place_on_a_card(layout, heads):
    compiled = compiled_for_card(steps_of_kernel, shapes(layout, heads, steps=(3,)))
    assert aliased_outputs(compiled) == (2 if layout == "separate" else 1)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**16
    assert re.search(r"bf16\[2048,[\d,]*\]\S* (copy|transpose)\(", compiled.as_text()) is None
    assert compiled.as_text().count("mosaic_gpu") > 0


@pytest.mark.lowering
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scatter_on_a_card_needs_no_atomics(layout):
    scatters = re.findall(r"ROOT .* scatter\(.*", compiled_for_card(ip.write_kv, shapes(layout, 8)).as_text())
    assert len(scatters) == (2 if layout == "separate" else 1)
    assert all("unique_indices=true" in scatter for scatter in scatters)


def test_auto_scatters_where_there_is_no_kernel():
    cache, *rows = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes("packed", 1, num_blocks=2))
    assert "mosaic" not in jax.jit(ip.write_kv).lower(cache, *rows).as_text()


REFUSED = [
    ({"head_dim": 8, "backend": "hopper"}, NotImplementedError, "a token's keys must take a multiple of 128 bytes"),
    ({"head_dim": 264, "backend": "hopper"}, NotImplementedError, "kv heads and head_dim must be at most 256"),
    ({"tokens": 0, "backend": "hopper"}, NotImplementedError, "k must have a row on Hopper; got none."),
    ({"backend": "hopper"}, NotImplementedError, "backend 'hopper' must run on its own GPUs; got cpu."),
    ({"interpret": True}, NotImplementedError, "interpret must be False for a scatter"),
    ({"interpret": 1, "backend": "hopper"}, ValueError, "interpret must be True or False; got 1."),
    ({"backend": "triton"}, ValueError, "backend must be 'auto' or one of 'portable', 'hopper'; got 'triton'."),
]


@pytest.mark.parametrize(("wrong", "error", "message"), REFUSED, ids=[message[:30] for *_, message in REFUSED])
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="on a GPU some of it is right")
def test_a_write_that_cannot_be_is_refused(wrong, error, message):
    sizes = {"head_dim": 64, "tokens": 3} | wrong
    head_dim, tokens = sizes.pop("head_dim"), sizes.pop("tokens")
    cache = ip.PagedKVCache.zeros(num_blocks=2, block_size=8, num_kv_heads=1, head_dim=head_dim)
    rows = jnp.zeros((tokens, 1, head_dim), jnp.bfloat16)
    with pytest.raises(error, match=re.escape(message)):
        ip.write_kv(cache, rows, rows, jnp.zeros(tokens, jnp.int32), **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 8])
def test_the_kernel_on_a_card_is_the_scatter(layout, heads):
    if not kernels_of(jax.devices()[0]):
        pytest.skip("no kernel for this GPU")
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes(layout, heads)[0])
    k, v = jnp.asarray(rng.standard_normal((2, 8192, heads, 128)), jnp.bfloat16)
    slots = jnp.asarray(rng.permutation(np.arange(-1000, 2048 * 16 + 1000))[:8192], jnp.int32)
    by_kernel, by_scatter = (ip.write_kv(cache, k, v, slots, backend=name) for name in ("hopper", "portable"))
    assert all((a == b).all() for a, b in zip(by_kernel.arrays, by_scatter.arrays, strict=True))
