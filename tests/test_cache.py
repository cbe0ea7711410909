"""PagedKVCache: every layout is read right, none is copied, wrong ones are refused in plain words."""

import dataclasses
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inkling_pallas as ip
from inkling_pallas.core import cache_layouts
from inkling_pallas.core.cache_layouts import LAYOUTS
from inkling_pallas.testing import assert_rows_close
from inkling_pallas.testing.cache_cases import in_layout
from inkling_pallas.testing.cases import Case, build
from inkling_pallas.testing.catalog import small_cases
from inkling_pallas.testing.judge import judge

COMBINED = ("packed", "interleaved")
CASE = Case(name="layouts", kind="chunked prefill", q_lens=(11, 5), kv_lens=(200, 75), padding_rows=3)
CALL = build(CASE)
PACKED_CALL = build(dataclasses.replace(CASE, layout="packed"))
# A layout changes where keys are read from, not what is done with them.
IN_EVERY_LAYOUT = {
    "small_mixed",
    "small_window",
    "small_page_48",
    "small_group_3",
    "small_dtype_float16",
    "small_poison_inf",
}
SHAPES = {"separate": (9, 16, 2, 128), "packed": (9, 2, 16, 256), "interleaved": (9, 16, 4, 128)}


def cache_of(layout: str, shape: tuple[int, ...] | None = None, dtype: Any = jnp.bfloat16) -> ip.PagedKVCache:
    array = jnp.zeros(SHAPES[layout] if shape is None else shape, dtype)
    return getattr(ip.PagedKVCache, layout)(*[array] * (2 if layout == "separate" else 1))


def numbered_cache() -> ip.PagedKVCache:
    """Returns a separate cache whose every element is its own number."""
    keys = np.arange(3 * 4 * 2 * 8, dtype=np.float32).reshape(3, 4, 2, 8)
    return ip.PagedKVCache.separate(jnp.asarray(keys), jnp.asarray(-1 - keys))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dims_are_read_from_the_shape(layout):
    cache = cache_of(layout)
    assert (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_dim) == (9, 16, 2, 128)
    assert cache.dtype == jnp.bfloat16
    made = ip.PagedKVCache.zeros(num_blocks=9, block_size=16, num_kv_heads=2, head_dim=128, layout=layout)
    assert made.layout == cache.layout
    assert [array.shape for array in made.arrays] == [array.shape for array in cache.arrays]
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    assert (stacked.layout, stacked.num_blocks, stacked.head_dim) == (layout, 9, 128)


def test_each_layout_keeps_a_key_where_its_stack_expects_it():
    source = numbered_cache()
    keys, values = source.arrays
    (packed,) = source.copy_to("packed").arrays
    (interleaved,) = source.copy_to("interleaved").arrays
    for page, token, head, i in itertools.product(range(3), range(4), range(2), range(8)):
        key, value = keys[page, token, head, i], values[page, token, head, i]
        assert (packed[page, head, token, i], packed[page, head, token, 8 + i]) == (key, value)
        assert (interleaved[page, token, 2 * head, i], interleaved[page, token, 2 * head + 1, i]) == (key, value)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(LAYOUTS, 2)))
def test_copying_to_a_layout_and_back_changes_nothing(first, second):
    cache = numbered_cache().copy_to(first)
    back = cache.copy_to(second).copy_to(first)
    assert back.layout == first
    assert all((a == b).all() for a, b in zip(back.arrays, cache.arrays, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("layout", COMBINED)
@pytest.mark.parametrize("case", [case for case in small_cases() if case.name in IN_EVERY_LAYOUT], ids=lambda c: c.name)
def test_cases_are_green_in_every_layout(case, layout):
    (converted,) = in_layout((case,), layout)
    assert judge(converted).failure == ""
    jax.clear_caches()


@pytest.mark.optimized
def test_layouts_give_the_same_bits():
    plain = ip.inkling_rel_attention(**CALL, return_lse=True)
    for layout in LAYOUTS:
        cache = ip.PagedKVCache.separate(CALL["key_cache"], CALL["value_cache"]).copy_to(layout)
        result = ip.inkling_rel_attention(**dict(CALL, key_cache=cache, value_cache=None), return_lse=True)
        assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(plain, result, strict=True))


@pytest.mark.optimized
@pytest.mark.parametrize("layout", COMBINED)
def test_everything_that_takes_a_call_takes_a_cache(layout):
    call = build(dataclasses.replace(CASE, layout=layout))
    plan = ip.plan_batch(**call)
    planned = ip.inkling_rel_attention(**call, plan=plan)
    assert (np.asarray(planned) == np.asarray(ip.inkling_rel_attention(**call))).all()
    np.testing.assert_array_equal(ip.reference_rel_attention(**call), ip.reference_rel_attention(**CALL))
    ip.check_batch(**call)
    assert ip.explain(**call).backend == "portable"
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call["key_cache"])
    assert ip.explain(**dict(call, key_cache=shapes)).backend == "portable"


@pytest.mark.optimized
@pytest.mark.parametrize("layout", COMBINED)
def test_layers_can_be_stacked_and_scanned(layout):
    call = build(dataclasses.replace(CASE, layout=layout))
    one = np.asarray(ip.inkling_rel_attention(**call))
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), call["key_cache"])

    def attend(cache: ip.PagedKVCache) -> Any:
        return ip.inkling_rel_attention(**dict(call, key_cache=cache))

    _, scanned = jax.lax.scan(lambda carry, cache: (carry, attend(cache)), None, stacked)
    np.testing.assert_array_equal(np.asarray(scanned), np.stack([one, one]))
    assert_rows_close(jax.vmap(attend)(stacked), np.stack([one, one]))


def large_ops(compiled: Any, elements: int) -> list[str]:
    """Returns the opcodes of a compiled module, fused ones included, whose result has so many elements or more."""
    found = re.findall(r"= [a-z0-9]+\[([\d,]*)\]\S* ([\w-]+)\(", compiled.as_text())
    return sorted({op for dims, op in found if math.prod(int(n) for n in dims.split(",") if n) >= elements})


def compiled_call(layout: str, *, copy_first: bool) -> Any:
    """Compiles a call over a pool far larger than what the call reads."""
    pool = {"num_blocks": 4096, "block_size": 16, "num_kv_heads": 2, "head_dim": 128}
    cache = jax.eval_shape(lambda: ip.PagedKVCache.zeros(**pool, layout=layout))
    arrays = {k: jnp.asarray(v) for k, v in CALL.items() if isinstance(v, np.ndarray) and not k.endswith("_cache")}
    static = {k: v for k, v in CALL.items() if k not in arrays and not k.endswith("_cache")}

    def attend(cache: ip.PagedKVCache, arrays: dict[str, jax.Array]) -> Any:
        read = cache.copy_to("separate") if copy_first else cache
        return ip.inkling_rel_attention(key_cache=read, value_cache=None, **arrays, **static)

    return jax.jit(attend).lower(cache, arrays).compile()


# These name or view a buffer.
MOVES_NOTHING = {"parameter", "bitcast", "get-tuple-element", "tuple", "while"}


@pytest.mark.optimized
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_is_copied_by_the_compiled_call(layout):
    compiled = compiled_call(layout, copy_first=False)
    elements = 4096 * 16 * 2 * 128
    assert set(large_ops(compiled, elements)) <= MOVES_NOTHING
    assert compiled.memory_analysis().temp_size_in_bytes < elements  # half of the keys alone


@pytest.mark.optimized
@pytest.mark.parametrize("layout", COMBINED)
def test_a_call_that_copies_the_cache_is_caught(layout):
    compiled = compiled_call(layout, copy_first=True)
    assert set(large_ops(compiled, 4096 * 16 * 2 * 128)) - MOVES_NOTHING


@pytest.mark.parametrize(
    ("layout", "fault"),
    [("packed", "swapped"), ("interleaved", "swapped"), ("packed", "shifted head"), ("interleaved", "shifted values")],
)
def test_a_wrong_reading_of_a_layout_is_caught(layout, fault, monkeypatch):
    right = cache_layouts.split

    def wrong(layout: str, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        k, v = right(layout, arrays)
        if fault == "swapped":
            return v, k
        return (jnp.roll(k, 1, axis=-2), v) if fault == "shifted head" else (k, jnp.roll(v, 1, axis=-1))

    monkeypatch.setattr(cache_layouts, "split", wrong)
    jax.clear_caches()
    try:
        assert judge(dataclasses.replace(CASE, layout=layout)).red
    finally:
        jax.clear_caches()


ERRORS = [
    (
        lambda: ip.PagedKVCache.packed(jnp.zeros((9, 2, 16, 255), jnp.bfloat16)),
        "array must have an even axis 3, being 2 * head_dim; got (9, 2, 16, 255). "
        "K and V lie side by side on that axis.",
    ),
    (
        lambda: ip.PagedKVCache.interleaved(jnp.zeros((9, 16, 3, 128), jnp.bfloat16)),
        "array must have an even axis 2, being 2 * num_kv_heads; got (9, 16, 3, 128). "
        "K and V lie side by side on that axis.",
    ),
    (
        lambda: ip.PagedKVCache.packed(jnp.zeros((9, 2, 16), jnp.bfloat16)),
        "array must have shape (num_blocks, num_kv_heads, block_size, 2 * head_dim); got (9, 2, 16). Its axes are the "
        "layout's; see PagedKVCache.",
    ),
    (
        lambda: ip.PagedKVCache.packed(jnp.zeros((9, 2, 16, 256), jnp.int8)),
        "array must be an array of bfloat16, float16, float32; got int8. "
        "Entries of 8 bits or fewer are not read. Its dtype is that of q.",
    ),
    (
        lambda: ip.PagedKVCache.separate([1.0], None),
        "keys must be a jax.Array or a NumPy array; got list. Convert it with jnp.asarray, or a torch tensor with "
        "jnp.from_dlpack.",
    ),
    (
        lambda: ip.PagedKVCache.separate(jnp.zeros((9, 16, 2, 128)), jnp.zeros((9, 16, 2, 64))),
        "values must have shape (9, 16, 2, 128); got (9, 16, 2, 64). It is an array like keys.",
    ),
    (
        lambda: cache_of("packed").copy_to("nhd"),
        "layout must be one of 'separate', 'packed', 'interleaved'; got 'nhd'. See PagedKVCache.",
    ),
    (
        lambda: ip.PagedKVCache.zeros(num_blocks=0, block_size=16, num_kv_heads=2, head_dim=128),
        "num_blocks must be a static int >= 1; got 0. Pass a Python int in that range.",
    ),
    (
        lambda: ip.PagedKVCache.zeros(num_blocks=4, block_size=16, num_kv_heads=2, head_dim=128, dtype=jnp.int8),
        "dtype must be one of bfloat16, float16, float32; got int8. It is that of q.",
    ),
    (
        lambda: ip.inkling_rel_attention(**dict(CALL, key_cache=cache_of("packed"))),
        "value_cache must be None where key_cache is a PagedKVCache; got ndarray. That cache holds the values, too.",
    ),
    (
        lambda: ip.inkling_rel_attention(**dict(CALL, key_cache=cache_of("packed", (9, 2, 16, 128)), value_cache=None)),
        "key_cache must have shape (num_blocks, num_kv_heads, block_size, 256); got (9, 2, 16, 128). "
        "head_dim is that of q.",
    ),
    (
        lambda: ip.inkling_rel_attention(
            **dict(CALL, key_cache=cache_of("interleaved", dtype=jnp.float16), value_cache=None)
        ),
        "q must have the dtype of key_cache, float16; got bfloat16. Cast it: q.astype(key_cache.dtype).",
    ),
    (
        lambda: ip.inkling_rel_attention(**dict(CALL, key_cache=cache_of("packed", (9, 3, 16, 256)), value_cache=None)),
        "num_heads must be a multiple of num_kv_heads = 3; got 8. Check axis 1 of q and axis 1 of key_cache.",
    ),
    (
        lambda: ip.inkling_rel_attention(**dict(CALL, value_cache=None)),
        "value_cache must be an array; got None. Pass one array of keys and values as PagedKVCache.packed(array) "
        "or .interleaved(array).",
    ),
    (
        lambda: ip.inkling_rel_attention(**PACKED_CALL, plan=ip.plan_batch(**CALL)),
        "plan must be made for layout = packed; got separate. Make one plan_batch per kind of layer.",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message[:40] for _, message in ERRORS])
def test_what_is_wrong_with_a_cache_is_said(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert str(caught.value) == message


def test_zeros_refuses_an_unknown_dtype():
    with pytest.raises(
        ValueError, match=r"^dtype must be one of bfloat16, float16, float32; got 'fp8'\. It is that of q\.$"
    ):
        ip.PagedKVCache.zeros(num_blocks=1, block_size=1, num_kv_heads=1, head_dim=16, dtype="fp8")
