"""What is said of wrong arguments beyond shapes and contents: names, values, rules and advice, in one line each."""

import dataclasses
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import inkling_pallas as ip
from inkling_pallas.kernels import blackwell, hopper, portable
from inkling_pallas.testing.cases import Case, build

pytestmark = pytest.mark.host
CALL = build(Case(name="words", kind="input", q_lens=(3, 2), kv_lens=(20, 40), rel_extent=8, head_dim=64))
LENGTHS = {name: CALL[name] for name in ("cu_seqlens_q", "cache_seqlens")}
CACHE = ip.PagedKVCache.zeros(num_blocks=2, block_size=8, num_kv_heads=1, head_dim=8)
NEW = jnp.ones((2, 1, 8), jnp.bfloat16)
LADDERS: Any = {"num_tokens": (8, 16), "batch_size": (4,), "max_seqlen_q": (1, 8), "max_blocks": (4,)}
INSIDE, SCALAR = "Pass a Python int in that range.", jnp.int32(4)


class Foreign:
    """Looks like a tensor of torch: its dtype is none of NumPy's."""

    shape, dtype = (5, 8, 64), "torch.bfloat16"


FOREIGN: Any = Foreign()


def attend(**changes: Any) -> Any:
    return jax.eval_shape(lambda: ip.inkling_rel_attention(**{**CALL, **changes}))


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(dims, dtype)


def explain(**changes: Any) -> Any:
    return ip.explain(**{**CALL, **changes})


def mesh() -> Any:
    return jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def shards() -> ip.ContextShards:
    return ip.cut_context([[1, 2], [3, 4]], [20, 20], num_shards=1, block_size=16)[0]


NOT_ARRAYS = {
    "q": lambda x: attend(q=x),
    "key_cache": lambda x: attend(key_cache=x),
    "value_cache": lambda x: attend(value_cache=x),
    "block_table": lambda x: attend(block_table=x),
    "cache_seqlens": lambda x: attend(cache_seqlens=x),
    "kv_offset": lambda x: attend(kv_offset=x),
    "rel_logits": lambda x: attend(rel_logits=x),
    "rel_logits.table": lambda x: attend(rel_logits=ip.ShearedLogits(table=x, shifts=x, rel_extent=8)),
    "out": lambda x: attend(out=x),
    "k": lambda x: ip.write_kv(CACHE, x, NEW, jnp.zeros(2, jnp.int32)),
    "v": lambda x: ip.write_kv(CACHE, NEW, x, jnp.zeros(2, jnp.int32)),
    "slots": lambda x: ip.write_kv(CACHE, NEW, NEW, x),
    "array": ip.PagedKVCache.packed,
    "keys": lambda x: ip.PagedKVCache.separate(x, NEW),
    "values": lambda x: ip.PagedKVCache.separate(jnp.ones((2, 8, 1, 8)), x),
    "r": lambda x: ip.relative_logits(x, NEW),
    "proj": lambda x: ip.sheared_relative_logits(NEW, x, **LENGTHS),
    "positions": ip.log_scaling,
    "cu_seqlens_q": lambda x: ip.shear(jnp.ones((5, 2, 8)), **{**LENGTHS, "cu_seqlens_q": x}),
    "lses": lambda x: ip.merge_partials([NEW], [x]),
}


@pytest.mark.parametrize("name", NOT_ARRAYS)
@pytest.mark.parametrize(
    ("value", "kind"), [(FOREIGN, f"{__name__}.Foreign"), ([[1.0]], "list")], ids=["torch", "list"]
)
def test_what_is_no_array_of_jax_or_numpy_is_named(name, value, kind):
    with pytest.raises(ValueError, match="must be a jax") as error:
        NOT_ARRAYS[name](value)
    advice = "Convert it with jnp.asarray, or a torch tensor with jnp.from_dlpack."
    assert str(error.value) == f"{name} must be a jax.Array or a NumPy array; got {kind}. {advice}"


PORTABLE = {"block_q": 4, "block_kv": 256, "tiles_per_step": 1}
CONFIGS = [
    (portable, {**PORTABLE, name: value}, name) for name in PORTABLE for value in (0, -1, 2.0, True, 2**40, SCALAR)
]
HOPPER = {"block_kv": 64, "num_stages": 2}
CONFIGS += [
    (module, {**HOPPER, name: value}, name)
    for module in (hopper, blackwell)
    for name, values in {
        "block_kv": (0, -64, 96, 64.0, True),
        "num_stages": (0, -1, 2.0, True, 1, 50),
        "band_slots": (0, -1, 1.0, True, 50),
        "num_ctas": (0, -1, 1.0, True, 10**9),
    }.items()
    for value in values
]
CONFIGS += [
    (hopper, {**HOPPER, name: value}, name)
    for name, value in {"program": "decoder", "overlap": 1, "few_rows": 3, "cluster_size": True}.items()
]
CONFIGS.append((blackwell, {**HOPPER, "splits": 1}, "splits"))


@pytest.mark.parametrize(("module", "fields", "name"), CONFIGS)
def test_a_config_says_what_is_wrong_with_it(module, fields, name):
    with pytest.raises(ValueError, match=rf"^(Config\.)?{name} must .*; got .*\. .*\.$"):
        module.Config(**fields)


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (hopper, hopper.Config(block_kv=128, num_stages=8)),
        (hopper, hopper.Config(block_kv=128, num_stages=8, program="prefill")),
        (blackwell, blackwell.Config(block_kv=128, num_stages=12)),
    ],
)
def test_a_config_that_fits_no_shared_memory_is_refused(module, config):
    name = module.__name__.rpartition(".")[2]
    rule = (
        r"^config must fit the shared memory of a CTA; got Config\(.*\)\. Use fewer stages or smaller tiles, or None\.$"
    )
    with pytest.raises(ValueError, match=rule):
        explain(backend=name, config=config)


@pytest.mark.parametrize("name", LADDERS)
@pytest.mark.parametrize("wrong", [(), 8, [8], (0,), (-1,), (8.0,), (True,), (2**31,), (SCALAR,)], ids=repr)
def test_buckets_say_what_is_wrong_with_them(name, wrong):
    with pytest.raises(ValueError, match=rf"^{name}(\[0\])? must .*; got .*\. .*\.$"):
        ip.Buckets(**{**LADDERS, name: wrong})


REFUSED = {
    "a scale on a device": (
        lambda: attend(softmax_scale=jnp.float32(0.1)),
        "softmax_scale must be a finite static float; got float32[]. Pass float(x): to read a jax.Array waits for its "
        "device.",
    ),
    "a size on a device": (
        lambda: attend(max_seqlen_q=SCALAR),
        "max_seqlen_q must be a static int >= 1; got int32[]. Pass int(x): to read a jax.Array waits for its device.",
    ),
    "a window on a device": (
        lambda: attend(window_size=(SCALAR, 0)),
        "window_size must be a pair (left, right) of static ints >= -1; got (int32[], 0). -1 leaves that side "
        "unlimited; (511, 0) keeps 512 keys.",
    ),
    "a long row": (
        lambda: explain(block_table=shape(2, 2**27, dtype=jnp.int32)),
        "block_table must have rows of at most 536870912 keys, max_blocks * block_size; got 2147483648. Use fewer "
        "columns: max_blocks is for the longest sequence.",
    ),
    "float32 rows": (
        lambda: attend(q=CALL["q"].astype(jnp.float32)),
        "q must have the dtype of key_cache, bfloat16; got float32. Cast it: q.astype(key_cache.dtype).",
    ),
    "an 8-bit cache": (
        lambda: attend(key_cache=CALL["key_cache"].astype(jnp.float8_e4m3fn)),
        "key_cache must be an array of bfloat16, float16, float32; got float8_e4m3fn. Entries of 8 bits or fewer are "
        "not read. Its dtype is that of q.",
    ),
    "vLLM's packed cache": (
        lambda: attend(key_cache=jnp.zeros((9, 2, 16, 128), jnp.bfloat16), value_cache=None),
        "key_cache must have shape (num_blocks, block_size, num_kv_heads, 64); got (9, 2, 16, 128). Pass vLLM's packed "
        "array as PagedKVCache.packed(key_cache), with value_cache=None.",
    ),
    "a stack of keys and values": (
        lambda: attend(key_cache=jnp.zeros((2, 9, 16, 2, 64), jnp.bfloat16), value_cache=None),
        "key_cache must have shape (num_blocks, block_size, num_kv_heads, 64); got (2, 9, 16, 2, 64). Pass "
        "key_cache[0] as key_cache and key_cache[1] as value_cache.",
    ),
    "heads of a mesh": (
        lambda: ip.AttentionMesh.make(mesh(), num_heads=7, num_kv_heads=2),
        "num_heads must be a multiple of num_kv_heads = 2; got 7. Both are those of the whole layer.",
    ),
    "a sequence past max_model_len": (
        lambda: ip.make_batch([1], [65], block_size=16, buckets=ip.Buckets(**LADDERS)),
        "max_blocks of a batch must be at most 4, the last bucket; got 5. A sequence is longer than max_model_len: end "
        "it there, or make Buckets for longer ones.",
    ),
    "a length past 2**29": (
        lambda: ip.make_batch([1], [2**29 + 1], block_size=16),
        f"kv_lens[0] must be a static int in [0, 536870912]; got 536870913. {INSIDE}",
    ),
    "a cut length past 2**29": (
        lambda: ip.cut_context([[1]], [2**29 + 1], num_shards=1, block_size=16),
        f"kv_lens[0] must be a static int in [0, 536870912]; got 536870913. {INSIDE}",
    ),
    "rows past 2**29": (
        lambda: ip.make_batch([2**29, 2**29], [2**29, 2**29], block_size=2**29),
        "q_lens must sum to at most 536870912; got 1073741824. Schedule less in a step.",
    ),
    "too few grown lengths": (
        lambda: shards().grown([21]),
        "total_seqlens must have one entry per sequence that was cut, shape (2,); got (1,). Cut the batch anew where "
        "sequences came or went.",
    ),
    "too few q_lens": (
        lambda: shards().slots([1]),
        "q_lens must have one entry per sequence that was cut, shape (2,); got (1,). Cut the batch anew where "
        "sequences came or went.",
    ),
    "a host size": (
        lambda: ip.AttentionMesh.make(mesh(), num_heads=0, num_kv_heads=2),
        f"num_heads must be a static int >= 1; got 0. {INSIDE}",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_value_the_rule_and_what_to_do(what):
    call, message = REFUSED[what]
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        call()
    assert str(error.value) == message


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_any_bound_of_splits_is_taken(backend):
    arrays = {
        "q": shape(32, 8, 64),
        "rel_logits": shape(32, 8, 8),
        "key_cache": shape(99, 16, 2, 64),
        "value_cache": shape(99, 16, 2, 64),
        "block_table": shape(32, 99, dtype=jnp.int32),
        "cache_seqlens": shape(32, dtype=jnp.int32),
        "cu_seqlens_q": shape(33, dtype=jnp.int32),
    }
    static = {**CALL, "max_seqlen_q": 1, "num_splits": 2**32, "backend": backend}
    result = jax.eval_shape(lambda arrays: ip.inkling_rel_attention(**{**static, **arrays}), arrays)
    assert result.shape == (32, 8, 64)


NEW_ROWS: Any = (jnp.ones((2, 1, 64), jnp.bfloat16),) * 2 + (jnp.zeros(2, jnp.int32),)
ON_CARDS = {
    "operator": (lambda x: ip.inkling_rel_attention(**{**CALL, "q": x}, backend="hopper"), CALL["q"]),
    "write_kv": (
        lambda x: ip.write_kv(ip.PagedKVCache.packed(x), *NEW_ROWS, backend="hopper").arrays,
        jnp.ones((2, 1, 16, 128), jnp.bfloat16),
    ),
    "shear": (lambda x: ip.shear(x, **LENGTHS, backend="hopper").table, CALL["rel_logits"]),
}


@pytest.mark.lowering
@pytest.mark.parametrize("what", ON_CARDS)
def test_a_jitted_kernel_without_a_card_says_so_in_our_words(what):
    call, operand = ON_CARDS[what]
    traced = jax.jit(call).trace(operand)
    with pytest.raises(NotImplementedError) as error:
        traced.lower(lowering_platforms=("cpu",))
    assert str(error.value) == (
        "backend 'hopper' must run on its own GPUs; got another device. Use backend='auto', or interpret=True to run "
        "it in the Pallas interpreter."
    )


def test_symbolic_shapes_are_refused_in_one_line():
    (rows,) = jax.export.symbolic_shape("rows")
    q = jax.ShapeDtypeStruct((rows, 8, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="fixed shape") as error:
        jax.export.export(jax.jit(lambda q: ip.inkling_rel_attention(**{**CALL, "q": q})))(q)
    assert str(error.value) == (
        "q must have a fixed shape; got (rows, 8, 64). Shapes are part of the program: export one for each bucket, and "
        "pad batches to it."
    )


class Unreadable:
    """An array that must not be read."""

    def __init__(self, *dims: int, dtype: str = "int32") -> None:
        self.shape, self.dtype = dims, np.dtype(dtype)

    def __repr__(self) -> str:
        raise AssertionError("read")

    __array__ = __str__ = __repr__


ROW: Any = Unreadable(2)
TABLE: Any = Unreadable(2, 3)
NODES = {
    "PagedKVCache(arrays=(int32[2,3],), layout='packed')": ip.PagedKVCache(arrays=(TABLE,), layout="packed"),
    "Batch(cu_seqlens_q=int32[2], cache_seqlens=int32[2], block_table=int32[2,3], slots=int32[2], positions=int32[2], "
    "max_seqlen_q=4)": ip.Batch(
        cu_seqlens_q=ROW, cache_seqlens=ROW, block_table=TABLE, slots=ROW, positions=ROW, max_seqlen_q=4
    ),
    "ShearedLogits(table=int32[2,3], shifts=int32[2], rel_extent=8)": ip.ShearedLogits(
        table=TABLE, shifts=ROW, rel_extent=8
    ),
    "ContextShards(block_table=int32[2,3], cache_seqlens=int32[2], kv_offset=int32[2], total_seqlens=int32[2], "
    "capacity=int32[2], block_size=16)": ip.ContextShards(
        block_table=TABLE, cache_seqlens=ROW, kv_offset=ROW, total_seqlens=ROW, capacity=ROW, block_size=16
    ),
}


@pytest.mark.parametrize("text", NODES)
def test_a_repr_is_one_line_and_reads_no_array(text):
    assert repr(NODES[text]) == text


def test_the_repr_of_a_plan_and_a_mesh_is_one_line():
    plan = ip.plan_batch(**CALL)
    unreadable = jax.tree.map(lambda x: Unreadable(*x.shape), plan.work)
    text = repr(dataclasses.replace(plan, work=unreadable))
    assert text.startswith("BatchPlan(work=Plan(sequences=Sequences(q_start=int32[2]")
    assert "\n" not in text
    assert "\n" not in repr(ip.AttentionMesh.make(mesh(), num_heads=8, num_kv_heads=1))
