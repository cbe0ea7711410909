"""Random batches over a dozen static shapes: live rows are right whatever the lengths and the page table hold."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import inkling_pallas as ip
from inkling_pallas.testing import ERROR_FLOORS, assert_rows_close


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The static side of a batch."""

    batch: int
    rows: int
    group: int
    kv_heads: int
    head_dim: int
    page: int
    blocks: int
    extent: int
    window: tuple[int, int]
    causal: bool = True
    dtype: str = "float32"

    @property
    def pool(self):
        return self.batch * self.blocks + 3


_SHAPES = [
    _Shape(1, 1, 8, 1, 64, 16, 20, 128, (-1, -1)),
    _Shape(3, 9, 4, 2, 64, 16, 8, 64, (-1, -1)),
    _Shape(3, 40, 3, 2, 32, 8, 16, 64, (31, 0)),
    _Shape(5, 24, 5, 1, 16, 1, 60, 9, (5, 0)),
    _Shape(2, 70, 1, 3, 24, 48, 4, 1024, (-1, -1)),
    _Shape(2, 33, 2, 2, 128, 784, 1, 128, (100, 0)),
    _Shape(4, 21, 2, 1, 40, 7, 12, 33, (-1, -1), False),
    _Shape(4, 21, 6, 1, 32, 16, 5, 64, (30, 12), False),
    _Shape(4, 12, 2, 2, 32, 16, 5, 8, (-1, 9), False),
    _Shape(3, 17, 12, 1, 16, 16, 6, 512, (20, -1), False),
    _Shape(6, 30, 4, 1, 64, 32, 6, 128, (127, 0), True, "bfloat16"),
    _Shape(8, 64, 16, 1, 64, 64, 3, 256, (-1, -1), True, "bfloat16"),
]
_EXAMPLES = 30


@functools.cache
def _run(shape):
    static = {
        "max_seqlen_q": shape.rows,
        "softmax_scale": 1 / shape.head_dim,
        "causal": shape.causal,
        "window_size": shape.window,
        "rel_extent": shape.extent,
        "return_lse": True,
    }
    return jax.jit(functools.partial(ip.inkling_rel_attention, **static, backend="portable")), static


@st.composite
def _batches(draw, shape):
    """Draws lengths, positions, a page table with garbage, and a seed for the data."""
    cuts = sorted(draw(st.lists(st.integers(0, shape.rows), min_size=shape.batch, max_size=shape.batch)))
    kv_lens = draw(st.lists(st.integers(0, shape.page * shape.blocks), min_size=shape.batch, max_size=shape.batch))
    offsets = draw(st.one_of(st.none(), st.lists(st.integers(0, 40), min_size=shape.batch, max_size=shape.batch)))
    later = draw(st.lists(st.integers(0, 30), min_size=shape.batch, max_size=shape.batch))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = rng.permutation(shape.pool)[: shape.batch * shape.blocks].reshape(shape.batch, shape.blocks)
    live = np.arange(shape.blocks) < -(-np.array(kv_lens) // shape.page)[:, None]
    garbage = rng.choice([-1, -(2**31), 2**31 - 1, shape.pool, 0], table.shape)
    call = {
        "block_table": np.where(live, table, garbage).astype(np.int32),
        "cache_seqlens": np.array(kv_lens, np.int32),
        "cu_seqlens_q": np.array([0, *cuts], np.int32),
    }
    if offsets is not None:
        call["kv_offset"] = np.array(offsets, np.int32)
        call["total_seqlens"] = call["kv_offset"] + call["cache_seqlens"] + np.array(later, np.int32)
    return call | _data(shape, rng, call)


def _data(shape, rng, call):
    """Returns q, caches and rel_logits with NaN wherever no live row or key is."""
    heads = shape.group * shape.kv_heads

    def normal(*size):
        return rng.standard_normal(size, np.float32)

    caches = []
    for _ in range(2):
        cache = np.full((shape.pool, shape.page, shape.kv_heads, shape.head_dim), np.nan, np.float32)
        for pages, length in zip(call["block_table"], call["cache_seqlens"], strict=True):
            index = np.arange(length)
            cache[pages[index // shape.page], index % shape.page] = normal(length, shape.kv_heads, shape.head_dim)
        caches.append(cache)
    q, rel_logits = normal(shape.rows, heads, shape.head_dim), normal(shape.rows, heads, shape.extent)
    for array in (q, rel_logits):
        array[call["cu_seqlens_q"][-1] :] = np.nan
    arrays = {"q": q, "key_cache": caches[0], "value_cache": caches[1], "rel_logits": rel_logits}
    return {name: array.astype(jnp.dtype(shape.dtype)) for name, array in arrays.items()}


@pytest.mark.full
@pytest.mark.parametrize("shape", _SHAPES, ids=lambda s: f"{s.batch}x{s.rows}g{s.group}p{s.page}")
@settings(max_examples=_EXAMPLES)
@given(data=st.data())
def test_random_batches(shape, data):
    call = data.draw(_batches(shape))
    run, static = _run(shape)
    out, lse = run(**call)
    expected, expected_lse = ip.reference_rel_attention(**call, **static)
    limit = 2 * ERROR_FLOORS[shape.dtype]
    assert_rows_close(out, expected, limit=limit, actual_lse=lse, expected_lse=expected_lse)


def test_there_are_enough_batches_and_shapes():
    assert len(set(_SHAPES)) == len(_SHAPES) >= 12
    assert _EXAMPLES * len(_SHAPES) >= 300


_WILD = st.sampled_from([-(2**31), -5, -1, 0, 1, 3, 8, 9, 500, 2**31 - 1])


@pytest.mark.full
@pytest.mark.optimized
@settings(max_examples=40)
@given(data=st.data())
def test_wild_contents_stay_in_bounds(data):
    """Sequence 0 keeps sound lengths and pages; everything else is arbitrary. Its rows must not change by a bit."""
    shape = _SHAPES[1]
    rng = np.random.default_rng(0)
    call = {
        "block_table": rng.permutation(shape.pool)[: shape.batch * shape.blocks]
        .reshape(shape.batch, -1)
        .astype(np.int32),
        "cache_seqlens": np.array([100, 30, 128], np.int32),
        "cu_seqlens_q": np.array([0, 4, 5, 9], np.int32),
    }
    call |= _data(shape, rng, call)
    run, _ = _run(shape)
    sound, _ = run(**call)
    for name in ("block_table", "cache_seqlens"):
        wild = call[name].copy()
        drawn = data.draw(st.lists(_WILD, min_size=wild[1:].size, max_size=wild[1:].size))
        wild[1:] = np.array(drawn).reshape(wild[1:].shape)
        call[name] = wild
    call["cu_seqlens_q"] = np.array([0, 4, *data.draw(st.lists(_WILD, min_size=2, max_size=2))], np.int32)
    out, lse = run(**call)
    np.testing.assert_array_equal(out[:4], sound[:4])
    assert np.isfinite(lse[:4]).all()
