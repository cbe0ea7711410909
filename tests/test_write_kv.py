"""write_kv: the tokens that have a slot are written, nothing else is touched, and a donated cache is not copied."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from writes import aliased_outputs, written_by_hand

import inkling_pallas as ip
from inkling_pallas.core import cache_layouts
from inkling_pallas.core.cache_layouts import LAYOUTS
from inkling_pallas.testing.cache_cases import small_write_cases
from inkling_pallas.testing.judge import judge

POOLS = ((5, 1, 1, 16), (3, 4, 2, 8), (2, 16, 3, 24))
TOKENS = 7
INT32 = st.integers(-(2**31), 2**31 - 1)
WRITE = jax.jit(ip.write_kv, donate_argnums=0)


def random_cache(layout: str, pool: tuple[int, ...], rng: np.random.Generator) -> ip.PagedKVCache:
    """Returns a cache of random numbers, so that a write to a wrong place shows."""
    keys, values = rng.standard_normal((2, *pool), np.float32)
    return ip.PagedKVCache.separate(jnp.asarray(keys), jnp.asarray(values)).copy_to(layout)


def check_write(write: Callable[..., Any], layout: str, pool: tuple[int, ...], slots: Any, seed: int = 0) -> None:
    """Asserts that a write leaves the cache as one by hand would; tokens that are to be skipped hold NaN."""
    rng = np.random.default_rng(seed)
    cache = random_cache(layout, pool, rng)
    slots = np.asarray(slots, np.int64).astype(np.int32)
    k, v = rng.standard_normal((2, len(slots), *pool[2:]), np.float32)
    k[(slots < 0) | (slots >= pool[0] * pool[1])] = np.nan
    expected = written_by_hand(cache, k, v, slots)
    written = write(cache, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
    assert written.layout == layout
    for got, want in zip(written.copy_to("separate").arrays, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


@st.composite
def drawn_slots(draw: st.DrawFn, capacity: int) -> list[int]:
    """Draws a slot for each token: no place twice, some out of range, near the edges more often than not."""
    edges = st.sampled_from([-1, 0, capacity - 1, capacity, capacity + 1, -capacity, 2**31 - 1, -(2**31)])
    slots = draw(st.lists(st.integers(0, capacity - 1) | edges | INT32, min_size=TOKENS, max_size=TOKENS))
    seen = set()
    return [-1 if slot in seen else (seen.add(slot), slot)[1] for slot in slots]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pool", POOLS)
@given(data=st.data(), seed=st.integers(0, 99))
def test_writes_are_what_a_loop_over_tokens_would_write(layout, pool, data, seed):
    check_write(WRITE, layout, pool, data.draw(drawn_slots(pool[0] * pool[1])), seed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_repeated_slot_holds_one_of_its_tokens_and_harms_no_other(layout):
    cache = ip.PagedKVCache.zeros(num_blocks=3, block_size=4, num_kv_heads=1, head_dim=8, layout=layout)
    k = jnp.arange(1, 5, dtype=jnp.bfloat16)[:, None, None] * jnp.ones((4, 1, 8), jnp.bfloat16)
    keys, values = WRITE(cache, k, -k, jnp.array([5, 5, 6, 5], jnp.int32)).copy_to("separate").arrays
    assert set(np.unique(np.asarray(keys[1, 1], np.float32))) <= {1, 2, 4}
    assert (keys[1, 2] == 3).all()
    assert (values[1, 2] == -3).all()
    assert int(jnp.count_nonzero(keys)) == 2 * 8


def compiled_write(
    function: Callable[..., Any], layout: str, *, donate: bool, heads: int = 2, tokens: tuple[int, ...] = (64,)
) -> Any:
    """Compiles a write of `tokens` into a pool of 1,024 pages of 16."""
    pool = {"num_blocks": 1024, "block_size": 16, "num_kv_heads": heads, "head_dim": 64}
    cache = jax.eval_shape(lambda: ip.PagedKVCache.zeros(**pool, layout=layout))
    rows = jax.ShapeDtypeStruct((*tokens, heads, 64), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct(tokens, jnp.int32)
    return jax.jit(function, donate_argnums=(0,) if donate else ()).lower(cache, rows, rows, slots).compile()


def scanned_write(cache: ip.PagedKVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> ip.PagedKVCache:
    """Writes step after step, the cache being the carry."""
    return lax.scan(lambda carry, step: (ip.write_kv(carry, *step), None), cache, (k, v, slots))[0]


def in_place(compiled: Any, layout: str) -> bool:
    """Returns whether a compiled write uses the buffers of its cache and nothing of that size besides."""
    copies = re.search(r"bf16\[1024,[\d,]*\]\S* copy\(", compiled.as_text()) is not None
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return aliased_outputs(compiled) == (2 if layout == "separate" else 1) and temporary < 2**20 and not copies


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("function", "tokens"), [(ip.write_kv, (64,)), (scanned_write, (5, 64))])
def test_a_donated_cache_is_written_in_place(layout, heads, function, tokens):
    assert in_place(compiled_write(function, layout, donate=True, heads=heads, tokens=tokens), layout)


def reshaping_write(cache: ip.PagedKVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> ip.PagedKVCache:
    """Writes rows of the flat pool: right, but XLA copies the pool for it where there is one kv head."""
    flat = cache.arrays[0].reshape(-1, 2 * cache.head_dim)
    rows = jnp.concatenate([k, v], axis=-1)[:, 0]
    return dataclasses.replace(cache, arrays=(flat.at[slots].set(rows).reshape(cache.arrays[0].shape),))


def test_a_write_that_copies_is_caught():
    assert not in_place(compiled_write(ip.write_kv, "packed", donate=False), "packed")
    assert not in_place(compiled_write(reshaping_write, "packed", donate=True, heads=1), "packed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_in_a_scan_are_those_of_single_steps(layout):
    def two_steps(cache: ip.PagedKVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> ip.PagedKVCache:
        return scanned_write(cache, *(x.reshape(2, -1, *x.shape[1:]) for x in (k, v, slots)))

    check_write(jax.jit(two_steps), layout, (3, 4, 2, 8), [11, -1, 3, 12, 0, 7])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_under_vmap_go_to_their_layer(layout):
    rng = np.random.default_rng(0)
    caches = [random_cache(layout, (3, 4, 2, 8), rng) for _ in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    k, v = jnp.asarray(rng.standard_normal((2, 2, 3, 2, 8), np.float32))
    slots = jnp.array([4, -1, 0], jnp.int32)
    written = jax.vmap(ip.write_kv, in_axes=(0, 0, 0, None))(stacked, k, v, slots)
    for layer, cache in enumerate(caches):
        alone = ip.write_kv(cache, k[layer], v[layer], slots)
        for got, want in zip(written.arrays, alone.arrays, strict=True):
            np.testing.assert_array_equal(np.asarray(got[layer]), np.asarray(want))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import inkling_pallas as ip
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
k, v = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 4, 8)), jnp.float32)
slots = jnp.array([17, -1, 0, 30, 31], jnp.int32)
for layout in ("separate", "packed", "interleaved"):
    cache = ip.PagedKVCache.zeros(num_blocks=8, block_size=4, num_kv_heads=4, head_dim=8, dtype=k.dtype, layout=layout)
    whole = ip.write_kv(cache, k, v, slots)
    heads, rows = cache.partition_spec("x"), P(None, "x", None)
    by_head = jax.shard_map(ip.write_kv, mesh=mesh, in_specs=(heads, rows, rows, P()), out_specs=heads)

    def write_own_pages(cache, k, v, slots):
        return ip.write_kv(cache, k, v, slots - jax.lax.axis_index("x") * (cache.num_blocks * cache.block_size))

    by_page = jax.shard_map(write_own_pages, mesh=mesh, in_specs=(P("x"), P(), P(), P()), out_specs=P("x"))
    for write in (by_head, by_page):
        written = jax.jit(write, donate_argnums=0)(jax.tree.map(jnp.copy, cache), k, v, slots)
        for got, want in zip(written.arrays, whole.arrays, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
            assert len(got.sharding.device_set) == 2
print("all right")
"""


def test_writes_under_shard_map_by_head_and_by_page():
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True)
    assert done.stdout.strip() == "all right", done.stderr


def _without_guard(page: jax.Array, cache: ip.PagedKVCache) -> jax.Array:
    return jnp.where(page == cache.num_blocks, -1, page)


def _clipped(page: jax.Array, cache: ip.PagedKVCache) -> jax.Array:
    return jnp.minimum(page, cache.num_blocks - 1)


def _next_page(page: jax.Array, cache: ip.PagedKVCache) -> jax.Array:
    return jnp.where(page < cache.num_blocks - 1, page + 1, page)


def broken_write(
    change_page: Callable[..., jax.Array], *, swapped: bool = False, shifted: int = 0
) -> Callable[..., Any]:
    """Returns a write_kv with a fault in it."""

    def write(cache: ip.PagedKVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> ip.PagedKVCache:
        page = jnp.where(slots < 0, cache.num_blocks, lax.div(slots, cache.block_size))
        offset = lax.rem(jnp.maximum(slots, 0) + shifted, cache.block_size)
        k, v = (v, k) if swapped else (k, v)
        arrays = cache_layouts.write_tokens(cache.layout, cache.arrays, change_page(page, cache), offset, k, v)
        return dataclasses.replace(cache, arrays=arrays)

    return write


BROKEN = {
    "-1 writes the last page": broken_write(_without_guard),
    "out of range is clipped": broken_write(_clipped),
    "wrong page": broken_write(_next_page),
    "wrong offset": broken_write(lambda page, cache: page, shifted=1),
    "K and V swapped": broken_write(lambda page, cache: page, swapped=True),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_write_is_caught(name, monkeypatch):
    slots = [0, -1, 5, 12, 2**31 - 1, 9]
    check_write(broken_write(lambda page, cache: page), "packed", (3, 4, 2, 8), slots)
    with pytest.raises(AssertionError):
        check_write(BROKEN[name], "packed", (3, 4, 2, 8), slots)
    monkeypatch.setattr("inkling_pallas.testing.judge.write_kv", BROKEN[name])
    verdict = judge(next(small_write_cases()))
    assert "write_kv left" in verdict.failure


ERRORS = [
    (
        {"cache": jnp.zeros((3, 4, 2, 8))},
        "cache must be a PagedKVCache; got ArrayImpl. Wrap raw arrays: PagedKVCache.separate(keys, values), "
        ".packed(array) or .interleaved(array).",
    ),
    (
        {"k": jnp.zeros((5, 3, 8), jnp.bfloat16)},
        "k must have shape (num_tokens, 2, 8); got (5, 3, 8). kv heads, head_dim and dtype are those of the cache.",
    ),
    (
        {"k": jnp.zeros((5, 2, 8), jnp.float32)},
        "k must have dtype bfloat16; got float32. kv heads, head_dim and dtype are those of the cache.",
    ),
    ({"v": jnp.zeros((4, 2, 8), jnp.bfloat16)}, "v must have shape (5, 2, 8); got (4, 2, 8). It is an array like k."),
    (
        {"slots": jnp.zeros((4,), jnp.int32)},
        "slots must have shape (5,); got (4,). One per row of k; -1 for a row that is not to be written.",
    ),
    (
        {"slots": jnp.zeros((5,), jnp.float32)},
        "slots must have dtype int32; got float32. One per row of k; -1 for a row that is not to be written.",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), ERRORS, ids=[message[:40] for _, message in ERRORS])
def test_what_is_wrong_with_a_write_is_said(wrong, message):
    rows = jnp.zeros((5, 2, 8), jnp.bfloat16)
    cache = ip.PagedKVCache.zeros(num_blocks=3, block_size=4, num_kv_heads=2, head_dim=8)
    right = {"cache": cache, "k": rows, "v": rows, "slots": jnp.zeros((5,), jnp.int32)}
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        ip.write_kv(**right | wrong)
    assert str(caught.value) == message
