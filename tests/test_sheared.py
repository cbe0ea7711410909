"""The sheared layout against its definition, position by position, and the operator on it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sheared_calls import shear_call

import inkling_pallas as ip
from inkling_pallas.core import sheared_layout
from inkling_pallas.testing import assert_rows_close, judge
from inkling_pallas.testing.cases import Case, build


def every_batch(extent):
    """Returns (cu_seqlens_q, cache_seqlens, kv_offset, total_seqlens) of one sequence for each prefix and offset.

    Whole prompts, chunks and decodes, offsets up to past the end of the sequence: positions on both sides of 0.
    """
    reach = extent + 9
    sequences = [
        (q_len, max(0, total - offset), offset, total)
        for q_len in (1, 2, 5)
        for total in range(q_len, reach + q_len)
        for offset in {0, 1, 6, 8, total // 2, total, total + 3, total + extent + 9}
    ]
    q_lens, cached, offset, total = (np.array(column, np.int32) for column in zip(*sequences, strict=True))
    return np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32), cached, offset, total


def positions(cu_seqlens_q, kv_offset, total):
    """Returns the position of each packed row, in keys of its block table."""
    q_lens = np.diff(cu_seqlens_q)
    rows = [total[b] - q_lens[b] + np.arange(q_lens[b]) - kv_offset[b] for b in range(len(q_lens))]
    return np.concatenate(rows)


def wrong_biases(table, rel_logits, position):
    """Returns how many (row, key) have another bias than the formula's, over all keys a row could meet."""
    extent, wrong = rel_logits.shape[-1], 0
    for row, plain, p in zip(np.asarray(table), rel_logits, position, strict=True):
        start = 8 * ((int(p) - extent + 1) // 8)
        keys = np.arange(start - 8, start + row.shape[-1] + 8)
        dist = p - keys
        expected = np.where((dist >= 0) & (dist < extent), plain[:, np.clip(dist, 0, extent - 1)], 0)
        read = np.pad(row, ((0, 0), (8, 8)))
        wrong += np.count_nonzero(read != expected)
        assert keys[8] % 8 == 0
        assert start <= p - extent + 1
        assert p < start + row.shape[-1]
    return wrong


def nonzero_table(tokens, heads, extent):
    return np.random.default_rng(extent).integers(1, 100, (tokens, heads, extent)).astype(np.float32)


@pytest.mark.parametrize("extent", [1, 7, 8, 9, 16, 20])
def test_every_position_has_its_bias_and_zero_elsewhere(extent):
    cu_seqlens_q, cached, offset, total = every_batch(extent)
    rel_logits = nonzero_table(cu_seqlens_q[-1], 2, extent)
    made = ip.shear(
        jnp.asarray(rel_logits),
        cu_seqlens_q=jnp.asarray(cu_seqlens_q),
        cache_seqlens=jnp.asarray(cached),
        kv_offset=jnp.asarray(offset),
        total_seqlens=jnp.asarray(total),
    )
    position = positions(cu_seqlens_q, offset, total)
    assert position.min() < -extent
    assert position.max() > extent
    assert wrong_biases(made.table, rel_logits, position) == 0
    assert made.table.shape[-1] % 8 == 0
    np.testing.assert_array_equal(made.plain(), rel_logits)


BROKEN_SHIFTS = {
    "made for q_len == kv_len": lambda row, position, offset, extent: row - (extent - 1),
    "kv_offset forgotten": lambda row, position, offset, extent: position + offset - (extent - 1),
    "one key late": lambda row, position, offset, extent: position - extent,
    "rounded towards zero": lambda row, position, offset, extent: np.abs(position - (extent - 1)),
    "extent forgotten": lambda row, position, offset, extent: position,
}


@pytest.mark.parametrize("what", BROKEN_SHIFTS)
def test_a_broken_shift_is_caught(what):
    extent = 20
    cu_seqlens_q, _, offset, total = every_batch(extent)
    q_lens = np.diff(cu_seqlens_q)
    row = np.concatenate([np.arange(n) for n in q_lens])
    position = positions(cu_seqlens_q, offset, total)
    wrong = BROKEN_SHIFTS[what](row, position, np.repeat(offset, q_lens), extent) % 8
    rel_logits = nonzero_table(len(row), 1, extent)
    table = sheared_layout.shear_rows(jnp.asarray(rel_logits), jnp.asarray(wrong, jnp.int32))
    assert wrong_biases(table, rel_logits, position) > 0


def test_rows_of_no_sequence_are_zero_whatever_they_held():
    call = shear_call(build(Case(name="padding", kind="sheared", q_lens=(3, 1), kv_lens=(9, 4), padding_rows=2)))
    made = call["rel_logits"]
    assert made.shifts[-2:].tolist() == [-1, -1]
    assert not np.asarray(made.table[-2:], np.float32).any()
    assert not np.asarray(made.plain()[-2:], np.float32).any()
    empty = ip.shear(jnp.ones((2, 1, 8)), cu_seqlens_q=jnp.zeros(1, jnp.int32), cache_seqlens=jnp.zeros(0, jnp.int32))
    assert not empty.table.any()


def test_a_table_fits_any_part_whose_offset_differs_by_a_multiple_of_8():
    call = build(Case(name="parts", kind="sheared", q_lens=(3, 1), kv_lens=(40, 33)))
    whole = shear_call(call)["rel_logits"]
    part = shear_call(dict(call, kv_offset=np.array([16, 24], np.int32), total_seqlens=call["cache_seqlens"]))
    np.testing.assert_array_equal(whole.table, part["rel_logits"].table)


CASES = [
    Case(name="chunk", kind="sheared", q_lens=(11, 5), kv_lens=(200, 75), padding_rows=3),
    Case(name="decode", kind="sheared", q_lens=(1, 1), kv_lens=(300, 77), rel_extent=60),
    Case(name="parts", kind="sheared", q_lens=(11, 5), kv_lens=(200, 75), parts=2, block_size=12, rel_extent=100),
    Case(
        name="right", kind="sheared", q_lens=(9, 4), kv_lens=(70, 50), causal=False, window_size=(30, 12), num_heads=2
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_operator_on_a_sheared_table_is_right(case):
    assert not judge.judge(case, judge.attend_sheared, backend="portable").red


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_a_table_made_for_whole_prompts_is_red(case):
    def careless(**call):
        made = shear_call(call)["rel_logits"]
        q_lens = np.diff(call["cu_seqlens_q"])
        row = np.concatenate([np.arange(n) for n in (*q_lens, len(call["q"]) - sum(q_lens))])
        shifts = sheared_layout.shift_of(jnp.asarray(row, jnp.int32), call["rel_extent"])
        table = sheared_layout.shear_rows(jnp.nan_to_num(jnp.asarray(call["rel_logits"])), shifts)
        return ip.inkling_rel_attention(**dict(call, rel_logits=dataclasses.replace(made, table=table)))

    assert judge.judge(case, careless, backend="portable").red


def test_the_oracle_reads_both_layouts_alike():
    call = build(Case(name="oracle", kind="sheared", q_lens=(3, 1), kv_lens=(40, 33), rel_extent=20))
    call["kv_offset"], call["total_seqlens"] = np.array([8, 3], np.int32), np.array([48, 50], np.int32)
    plain, of_sheared = (ip.reference_rel_attention(**x) for x in (call, shear_call(call)))
    np.testing.assert_array_equal(plain, of_sheared)


@pytest.mark.optimized
def test_producers_agree_and_run_under_jit():
    lengths: dict[str, Any] = {
        "cu_seqlens_q": jnp.array([0, 3, 4], jnp.int32),
        "cache_seqlens": jnp.array([9, 300], jnp.int32),
    }
    keys = jax.random.split(jax.random.key(0))
    r, proj = jax.random.normal(keys[0], (5, 2, 16)), jax.random.normal(keys[1], (16, 24))
    tau = ip.log_scaling(jnp.arange(5) * 100_000)
    made = jax.jit(ip.sheared_relative_logits)(r, proj, tau, **lengths)
    expected = ip.shear(ip.relative_logits(r, proj, tau), **lengths)
    np.testing.assert_array_equal(made.table, expected.table)
    np.testing.assert_array_equal(made.shifts, expected.shifts)


def test_plan_explain_and_check_take_a_sheared_table():
    call = shear_call(build(Case(name="plan", kind="sheared", q_lens=(3, 1), kv_lens=(40, 33))))
    ip.check_batch(**call)
    form = ip.ShearedLogits.shape(4, 8, call["rel_extent"], call["q"].dtype)
    assert jax.tree.map(jnp.shape, form) == jax.tree.map(jnp.shape, call["rel_logits"])
    assert ip.explain(**{**call, "rel_logits": form}).backend == "portable"
    plan = ip.plan_batch(**{**call, "rel_logits": form})
    expected = ip.reference_rel_attention(**call)
    assert_rows_close(ip.inkling_rel_attention(**call, plan=plan), expected, limit=8e-3)
    with pytest.raises(ValueError, match=r"plan must be made for sheared = True; got False\."):
        ip.inkling_rel_attention(**call, plan=ip.plan_batch(**dict(call, rel_logits=None)))


REFUSED = {
    r"rel_logits must have shape": lambda call: {"rel_logits": call["rel_logits"].table},
    r"rel_logits must be sheared for rel_extent = 120": lambda call: {"rel_extent": 120},
    r"rel_logits\.table must have shape": lambda call: {
        "rel_logits": dataclasses.replace(call["rel_logits"], table=call["rel_logits"].table[..., :-8])
    },
    r"rel_logits\.table must have dtype": lambda call: {
        "rel_logits": dataclasses.replace(call["rel_logits"], table=call["rel_logits"].table.astype(jnp.float32))
    },
    r"rel_logits\.shifts must have shape": lambda call: {
        "rel_logits": dataclasses.replace(call["rel_logits"], shifts=call["rel_logits"].shifts[:-1])
    },
    r"rel_logits\.shifts\[0\] must be \d, from the position": lambda call: {"cache_seqlens": call["cache_seqlens"] - 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_table_that_does_not_fit_is_named(message):
    call = shear_call(build(Case(name="refused", kind="sheared", q_lens=(3, 1), kv_lens=(40, 33))))
    with pytest.raises(ValueError, match=message):
        ip.check_batch(**{**call, **REFUSED[message](call)})


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("backend must be 'auto' or one of", {"backend": "cuda"}),
        ("interpret must be False without a kernel", {"interpret": True}),
        ("cu_seqlens_q must have shape", {"cu_seqlens_q": jnp.zeros(5, jnp.int32)}),
        ("cache_seqlens must have dtype int32", {"cache_seqlens": jnp.zeros(1)}),
    ],
)
def test_a_producer_refuses_wrong_arguments(message, change):
    lengths: dict[str, Any] = {"cu_seqlens_q": jnp.array([0, 3], jnp.int32), "cache_seqlens": jnp.array([9], jnp.int32)}
    with pytest.raises(ValueError, match=message):
        ip.shear(jnp.ones((3, 1, 8)), **{**lengths, **change})
    with pytest.raises(ValueError, match="rel_logits must have"):
        ip.shear(jnp.ones((3, 8)), **lengths)


def test_a_mesh_takes_a_sheared_table():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("heads", "context"), axis_types=auto, devices=jax.devices()[:1])
    devices = ip.AttentionMesh.make(mesh, num_heads=8, num_kv_heads=2, head_axis="heads", context_axis="context")
    call = build(Case(name="mesh", kind="sheared", q_lens=(3, 1), kv_lens=(40, 33), poison=()))
    call: dict[str, Any] = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in shear_call(call).items()
    }
    expected = ip.inkling_rel_attention(**call)
    cache = ip.PagedKVCache.separate(call.pop("key_cache"), call.pop("value_cache"))
    tables = [np.asarray(row)[:count].tolist() for row, count in zip(call.pop("block_table"), (3, 3), strict=True)]
    shards, pages = ip.cut_context(tables, call.pop("cache_seqlens").tolist(), num_shards=1, block_size=16)
    out = devices.attend(call.pop("q"), devices.place(ip.take_pages(cache, pages)), shards=shards, **call)
    assert_rows_close(out, np.asarray(expected, np.float64), limit=8e-3)
