"""Wrong input: the full text of each message, at trace time for shapes and statics, on the host for contents."""

import os
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inkling_pallas as ip
from inkling_pallas.testing.cases import Case, build

# ruff: noqa: E501 - a message stands here as the user sees it, in one piece
_CALL = build(Case(name="input", kind="input", q_lens=(3, 2), kv_lens=(20, 40), rel_extent=8, head_dim=64))


def _with(**changes):
    return {**_CALL, **changes}


def _array(name, shape=None, dtype=None):
    array = _CALL[name]
    return jnp.zeros(array.shape if shape is None else shape, array.dtype if dtype is None else dtype)


_REFUSED = {
    "max_seqlen_q zero": (
        {"max_seqlen_q": 0},
        "max_seqlen_q must be a static int >= 1; got 0. Pass a Python int in that range.",
    ),
    "max_seqlen_q float": (
        {"max_seqlen_q": 2.0},
        "max_seqlen_q must be a static int >= 1; got 2.0. Pass a Python int in that range.",
    ),
    "max_seqlen_q bool": (
        {"max_seqlen_q": True},
        "max_seqlen_q must be a static int >= 1; got True. Pass a Python int in that range.",
    ),
    "rel_extent": (
        {"rel_extent": 9},
        "rel_logits must have shape (5, 8, 9); got (5, 8, 8). It is [num_tokens, num_heads, rel_extent] in q's dtype.",
    ),
    "rel_extent zero": (
        {"rel_extent": 0},
        "rel_extent must be a static int >= 1; got 0. Pass a Python int in that range.",
    ),
    "num_splits": (
        {"num_splits": 0},
        "num_splits must be a static int >= 1; got 0. Pass a Python int in that range.",
    ),
    "softmax_scale": (
        {"softmax_scale": float("nan")},
        "softmax_scale must be a finite static float; got nan. Inkling uses 1 / head_dim; there is no default.",
    ),
    "causal": ({"causal": 1}, "causal must be True or False; got 1. It is part of the compiled program."),
    "return_lse": (
        {"return_lse": None},
        "return_lse must be True or False; got None. It is part of the compiled program.",
    ),
    "interpret": (
        {"interpret": "yes"},
        "interpret must be True or False; got 'yes'. It is part of the compiled program.",
    ),
    "window_size": (
        {"window_size": (-2, 0)},
        "window_size must be a pair (left, right) of static ints >= -1; got (-2, 0). "
        "-1 leaves that side unlimited; (511, 0) keeps 512 keys.",
    ),
    "window_size scalar": (
        {"window_size": 511},
        "window_size must be a pair (left, right) of static ints >= -1; got 511. "
        "-1 leaves that side unlimited; (511, 0) keeps 512 keys.",
    ),
    "heads": (
        {"q": _array("q", (5, 7, 64))},
        "num_heads must be a multiple of num_kv_heads = 2; got 7. Check axis 1 of q and axis 2 of key_cache.",
    ),
    "q rank": (
        {"q": _array("q", (5, 64))},
        "q must have shape (num_tokens, num_heads, head_dim); got (5, 64). Pack the rows of all sequences on axis 0.",
    ),
    "q dtype": (
        {"q": _array("q", dtype=jnp.int32)},
        "q must be an array of bfloat16, float16, float32; got int32. Cast it with .astype().",
    ),
    "q list": (
        {"q": [[1.0]]},
        "q must be a jax.Array or a NumPy array; got list. Convert it with jnp.asarray, or a torch tensor with jnp.from_dlpack.",
    ),
    "key_cache rank": (
        {"key_cache": _array("key_cache", (4, 16, 64))},
        "key_cache must have shape (num_blocks, block_size, num_kv_heads, 64); got (4, 16, 64). head_dim is that of q.",
    ),
    "key_cache dtype": (
        {"key_cache": _array("key_cache", dtype=jnp.float16)},
        "q must have the dtype of key_cache, float16; got bfloat16. Cast it: q.astype(key_cache.dtype).",
    ),
    "value_cache": (
        {"value_cache": _array("value_cache", (9, 16, 1, 64))},
        f"value_cache must have shape {_CALL['key_cache'].shape}; got (9, 16, 1, 64). It has the shape and dtype of key_cache.",
    ),
    "rel_logits dtype": (
        {"rel_logits": _array("rel_logits", dtype=jnp.float32)},
        "rel_logits must have dtype bfloat16; got float32. It is [num_tokens, num_heads, rel_extent] in q's dtype.",
    ),
    "rel_logits missing": (
        {"rel_logits": None},
        "rel_logits must be an array; got None. It is [num_tokens, num_heads, rel_extent]; see relative_logits().",
    ),
    "block_table dtype": (
        {"block_table": jnp.zeros((2, 3), jnp.int16)},
        "block_table must have dtype int32; got int16. It holds a page id per block of keys.",
    ),
    "block_table of floats": (
        {"block_table": np.zeros((2, 3), np.float64)},
        "block_table must have dtype int32; got float32. It holds a page id per block of keys.",
    ),
    "block_table rank": (
        {"block_table": _array("block_table", (6,))},
        "block_table must have shape (batch, max_blocks); got (6,). It holds a page id per block of keys.",
    ),
    "cache_seqlens": (
        {"cache_seqlens": jnp.zeros((3,), jnp.int32)},
        "cache_seqlens must have shape (2,); got (3,). One length per row of block_table.",
    ),
    "cu_seqlens_q": (
        {"cu_seqlens_q": jnp.zeros((2,), jnp.int32)},
        "cu_seqlens_q must have shape (3,); got (2,). It is batch + 1 row offsets.",
    ),
    "kv_offset": (
        {"kv_offset": jnp.zeros((1,), jnp.int32)},
        "kv_offset must have shape (2,); got (1,). One value per row of block_table, or None.",
    ),
    "total_seqlens": (
        {"total_seqlens": jnp.zeros((2,), jnp.float32)},
        "total_seqlens must have dtype int32; got float32. One value per row of block_table, or None.",
    ),
    "out": (
        {"out": jnp.zeros((5, 8, 64), jnp.float32)},
        "out must have dtype bfloat16; got float32. It is an array like the result.",
    ),
    "out_dtype": (
        {"out_dtype": jnp.int8},
        "out_dtype must be one of bfloat16, float16, float32; got int8. None gives the dtype of q.",
    ),
    "out_dtype word": (
        {"out_dtype": "floaty"},
        "out_dtype must be one of bfloat16, float16, float32; got 'floaty'. None gives the dtype of q.",
    ),
    "config": (
        {"config": {"block_q": 8}},
        "config must be a Config of inkling_pallas.kernels.portable or None; got dict. None lets the backend choose.",
    ),
    "interpret portable": (
        {"backend": "portable", "interpret": True},
        "interpret must be False for backend 'portable'; got True. It is plain JAX and runs on a CPU as it is; to interpret a kernel, name it: backend='hopper'.",
    ),
    "plan": ({"plan": {}}, "plan must be a BatchPlan or None; got dict. Make one plan_batch per kind of layer."),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_refused_at_trace_time(what):
    changes, message = _REFUSED[what]
    arguments = _with(**changes)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        jax.eval_shape(lambda: ip.inkling_rel_attention(**arguments))
    assert str(error.value) == message


def test_an_unknown_backend_names_those_there_are():
    message = "backend must be 'auto' or one of 'portable', 'hopper', 'blackwell'; got 'cuda'. 'auto' takes the fastest that can."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ip.inkling_rel_attention(**_with(backend="cuda"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "max_seqlen_q",
            "max_seqlen_q must be a static int >= 1; got a traced array. "
            "Pass a Python int; under jax.jit name the argument in static_argnames.",
        ),
        (
            "softmax_scale",
            "softmax_scale must be a finite static float; got a traced array. "
            "Pass a Python float; under jax.jit name the argument in static_argnames.",
        ),
        ("causal", "causal must be True or False; got a traced array. It is part of the compiled program."),
    ],
)
def test_a_traced_static_is_refused(name, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        jax.jit(lambda value: ip.inkling_rel_attention(**_with(**{name: value})))(_CALL[name])
    assert str(error.value) == message


def test_an_unsupported_head_dim_is_no_wrong_input():
    message = "No backend takes this call. portable: head_dim must be 16 to 256 in steps of 8; got 20. Pad q and the caches with zeros."
    cache = _array("key_cache", (*_CALL["key_cache"].shape[:3], 20))
    with pytest.raises(NotImplementedError) as error:
        ip.inkling_rel_attention(
            **_with(q=_array("q", (5, 8, 20)), key_cache=cache, value_cache=cache), backend="portable"
        )
    assert str(error.value) == message


def test_a_wrong_name_is_a_type_error():
    with pytest.raises(TypeError, match="cache_seqlen"):
        ip.check_batch(**_with(), cache_seqlen=3)


def _entry(name, index, value):
    array = _CALL[name].copy()
    array[index] = value
    return {name: array}


_FAR = np.array([[1, 2, 3], [4, 2**32 + 3, 5]])  # int64, as NumPy makes it
_LONG: Any = np.array([20, 2**32 + 20])
INT64 = {
    "the operator": (lambda: ip.inkling_rel_attention(**_with(block_table=_FAR)), "block_table[1, 1]", 2**32 + 3),
    "a plan": (lambda: ip.plan_batch(**_with(cache_seqlens=_LONG)), "cache_seqlens[1]", 2**32 + 20),
    "check_batch": (lambda: ip.check_batch(**_with(cu_seqlens_q=np.array([0, 3, 2**40]))), "cu_seqlens_q[2]", 2**40),
    "write_kv": (
        lambda: ip.write_kv(ip.PagedKVCache.zeros(num_blocks=2, block_size=8, num_kv_heads=1, head_dim=8), *_NEW),
        "slots[1]",
        -(2**31) - 1,
    ),
    "shear": (
        lambda: ip.shear(jnp.ones((5, 2, 8)), cu_seqlens_q=jnp.array([0, 3, 5], jnp.int32), cache_seqlens=_LONG),
        "cache_seqlens[1]",
        2**32 + 20,
    ),
}
_NEW: Any = (jnp.ones((2, 1, 8), jnp.bfloat16),) * 2 + (np.array([3, -(2**31) - 1]),)


@pytest.mark.parametrize("what", INT64)
def test_integers_that_are_no_int32_are_named_and_do_not_wrap_around(what):
    call, where, value = INT64[what]
    name = where.split("[")[0]
    with pytest.raises(ValueError, match="must be an int32") as error:
        call()
    assert str(error.value) == f"{where} must be an int32; got {value}. 1 entries of {name} break this rule."


def test_int64_of_numpy_is_taken_everywhere():
    wide = {name: _CALL[name].astype(np.int64) for name in ("block_table", "cache_seqlens", "cu_seqlens_q")}
    chex.assert_trees_all_equal(ip.inkling_rel_attention(**_with(**wide)), ip.inkling_rel_attention(**_CALL))
    cache = ip.PagedKVCache.zeros(num_blocks=2, block_size=8, num_kv_heads=1, head_dim=8)
    slots: Any = np.array([3, -1])
    written = [ip.write_kv(cache, _NEW[0], _NEW[1], s).arrays for s in (slots, jnp.asarray(slots, jnp.int32))]
    chex.assert_trees_all_equal(*written)
    bias = jnp.ones((5, 2, 8))
    lengths: Any = {"cu_seqlens_q": np.array([0, 3, 5]), "cache_seqlens": np.array([20, 9])}
    sheared = ip.shear(bias, **lengths)
    chex.assert_trees_all_equal(sheared, ip.shear(bias, **jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), lengths)))


_WRONG_CONTENTS = {
    "lengths of the keys before this step": (
        _entry("cache_seqlens", 0, 2),
        "cache_seqlens[0] must be at least the rows of its sequence, whose keys it counts; got 2. "
        "1 entries of cache_seqlens break this rule.",
    ),
    "page id": (
        _entry("block_table", (1, 2), 99),
        "block_table[1, 2] must lie in [0, 9), being the id of a page that this call reads; got 99. "
        "1 entries of block_table break this rule.",
    ),
    "length": (
        _entry("cache_seqlens", 0, 49),
        "cache_seqlens[0] must lie in [0, 48], the keys its table row can hold; got 49. 1 entries of cache_seqlens break this rule.",
    ),
    "negative length": (
        _entry("cache_seqlens", 1, -1),
        "cache_seqlens[1] must lie in [0, 48], the keys its table row can hold; got -1. 1 entries of cache_seqlens break this rule.",
    ),
    "first offset": (
        _entry("cu_seqlens_q", 0, 1),
        "cu_seqlens_q[0] must be 0; got 1. 1 entries of cu_seqlens_q break this rule.",
    ),
    "offset past the rows": (
        _entry("cu_seqlens_q", 2, 6),
        "cu_seqlens_q[2] must lie in [0, 5], the rows of q; got 6. 1 entries of cu_seqlens_q break this rule.",
    ),
    "decreasing offsets": (
        _entry("cu_seqlens_q", 2, 2),
        "cu_seqlens_q[2] must be at least the entry before it; got 2. 1 entries of cu_seqlens_q break this rule.",
    ),
    "long q": (
        {"max_seqlen_q": 2},
        "q_len (the step of cu_seqlens_q)[0] must be at most max_seqlen_q = 2; got 3. "
        "1 entries of q_len (the step of cu_seqlens_q) break this rule.",
    ),
    "kv_offset": (
        {"kv_offset": np.array([0, -1], np.int32)},
        "kv_offset[1] must lie in [0, 536870912]; got -1. 1 entries of kv_offset break this rule.",
    ),
    "far offset": (
        {"kv_offset": np.array([0, 600_000_000], np.int32), "total_seqlens": np.array([20, 600_000_040], np.int32)},
        "kv_offset[1] must lie in [0, 536870912]; got 600000000. 1 entries of kv_offset break this rule.",
    ),
    "total_seqlens": (
        {"total_seqlens": np.array([19, 40], np.int32)},
        "total_seqlens[0] must be at least kv_offset + cache_seqlens of its sequence; got 19. "
        "1 entries of total_seqlens break this rule.",
    ),
}


@pytest.mark.parametrize("what", _WRONG_CONTENTS)
def test_wrong_contents_are_named_by_check_batch(what):
    changes, message = _WRONG_CONTENTS[what]
    ip.check_batch(**_CALL)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        ip.check_batch(**_with(**changes))
    assert str(error.value) == message


def test_check_batch_does_not_mind_what_is_never_read():
    case = Case(name="freed", kind="input", q_lens=(2,), kv_lens=(400,), window_size=(63, 0), freed_pages=True)
    ip.check_batch(**build(case))
    no_part = _with(
        cache_seqlens=np.array([0, 40], np.int32),
        kv_offset=np.array([64, 0], np.int32),
        total_seqlens=np.array([20, 40], np.int32),
    )
    ip.check_batch(**no_part)
    part = _with(cache_seqlens=np.array([2, 40], np.int32), kv_offset=np.zeros(2, np.int32))
    ip.check_batch(**part)  # of a context axis; it need not hold the keys of all rows


def test_check_batch_is_for_the_host():
    with pytest.raises(ValueError, match=r"check_batch runs on the host: call it outside jax\.jit"):
        jax.jit(lambda lengths: ip.check_batch(**_with(cache_seqlens=lengths)))(jnp.asarray(_CALL["cache_seqlens"]))


def test_a_kernel_named_on_a_device_it_is_not_for_is_refused():
    if jax.default_backend() != "cpu":
        pytest.skip("needs a CPU to be refused on")
    decode = build(Case(name="decode", kind="input", q_lens=(1,), kv_lens=(20,), rel_extent=8, head_dim=64))
    with pytest.raises(
        NotImplementedError, match=r"^backend 'hopper' must run on its own GPUs; got cpu\. Use backend='auto', or"
    ):
        ip.inkling_rel_attention(**decode, backend="hopper")


INTERPRETED = {
    "the operator": lambda: ip.inkling_rel_attention(**_CALL, backend="hopper", interpret=True),
    "under jit": lambda: jax.jit(lambda q: ip.inkling_rel_attention(**_with(q=q), backend="hopper", interpret=True))(
        _CALL["q"]
    ),
    "a plan": lambda: ip.plan_batch(**_CALL, backend="hopper", interpret=True),
    "write_kv": lambda: ip.write_kv(
        ip.PagedKVCache.zeros(num_blocks=2, block_size=16, num_kv_heads=1, head_dim=64),
        jnp.ones((2, 1, 64), jnp.bfloat16),
        jnp.ones((2, 1, 64), jnp.bfloat16),
        jnp.zeros(2, jnp.int32),
        backend="hopper",
        interpret=True,
    ),
    "shear": lambda: ip.shear(
        jnp.ones((5, 2, 8), jnp.bfloat16),
        cu_seqlens_q=jnp.array([0, 3, 5], jnp.int32),
        cache_seqlens=jnp.array([20, 9], jnp.int32),
        backend="hopper",
        interpret=True,
    ),
}


@pytest.mark.parametrize("what", INTERPRETED)
@pytest.mark.parametrize("given", [None, "2", "all"])
def test_the_interpreter_does_not_hang_on_few_cores(what, given, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv("NPROC") if given is None else monkeypatch.setenv("NPROC", given)
    with pytest.raises(ValueError, match="interpret") as error:
        INTERPRETED[what]()
    assert str(error.value) == (
        "interpret must be False with fewer than 16 threads; got True on 2. "
        "Set NPROC=16 in the environment of a new process, before jax starts."
    )
