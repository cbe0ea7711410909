"""The kernels that write the sheared layout: interpreted with race detection, exact; lowered; compiled for sm_90a."""

import dataclasses
import re
from typing import Any

import absent_card
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from twins import WAYS, expect, numbers, result, run, through_smem

import inkling_pallas as ip
from inkling_pallas import relative_bias
from inkling_pallas.core.devices import H200, Place
from inkling_pallas.core.sheared_layout import ShearedLogits, shear_rows
from inkling_pallas.kernels import shear
from inkling_pallas.kernels.mosaic import sheared_loads
from inkling_pallas.kernels.shear import tile_rows
from inkling_pallas.kernels.shear import tiling as shear_tiling

_INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)


def shifts_of(num_tokens, seed=0):
    """Returns every shift there is, in a random order; the last row belongs to no sequence."""
    shifts = np.random.default_rng(seed).permutation(np.arange(num_tokens) % 8)
    return jnp.asarray(np.append(shifts[:-1], -1), jnp.int32)


def whole_numbers(*shape, dtype=jnp.bfloat16, seed=0):
    """Returns small whole numbers: 16 products of them have the same sum in any order."""
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


def with_dead_rows(x, value=np.nan):
    return x.at[-1].set(value)


# Tokens, heads, extent: several tokens in a tile, one token over tiles, tokens across tiles, copies of several boxes.
SHAPES = [(17, 8, 128), (2, 128, 64), (9, 12, 8), (7, 3, 264), (5, 1, 16)]


@pytest.mark.interpreter
@pytest.mark.parametrize(("tokens", "heads", "extent"), SHAPES)
def test_shear_is_exact_without_a_race(tokens, heads, extent, capfd):
    rel_logits, shifts = with_dead_rows(numbers(tokens, heads, extent, dtype=jnp.bfloat16)), shifts_of(tokens)
    np.testing.assert_array_equal(shear.shear(rel_logits, shifts, _INTERPRETER), shear_rows(rel_logits, shifts))
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.interpreter
@pytest.mark.parametrize(("tokens", "heads", "extent"), SHAPES)
def test_project_is_exact_without_a_race(tokens, heads, extent, capfd):
    r, proj = with_dead_rows(whole_numbers(tokens, heads, 16)), whole_numbers(16, extent, seed=1)
    shifts, tau = shifts_of(tokens), with_dead_rows(jnp.arange(tokens, dtype=jnp.float32) % 3)
    tau = None if heads == 12 else tau
    expected = shear_rows(ip.relative_logits(r, proj, tau), shifts)
    np.testing.assert_array_equal(shear.project(r, proj, tau, shifts, _INTERPRETER), expected)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.interpreter
def test_a_cta_walks_many_tiles(capfd):
    card = dataclasses.replace(H200, num_sms=1)
    tokens, heads, extent = 40, 8, 264
    shifts = shifts_of(tokens)
    rel_logits = numbers(tokens, heads, extent, dtype=jnp.float16)
    tiles = shear_tiling.ShearTiles.make(rel_logits, extent, True, card=card)
    assert tiles.num_tiles > tiles.workers * sum(tiles.buffers)
    sheared = shear.shear(rel_logits, shifts, _INTERPRETER, card)
    np.testing.assert_array_equal(sheared, shear_rows(rel_logits, shifts))
    r, proj = whole_numbers(tokens, heads, 16, dtype=jnp.float16), whole_numbers(16, extent, dtype=jnp.float16)
    expected = shear_rows(ip.relative_logits(r, proj), shifts)
    np.testing.assert_array_equal(shear.project(r, proj, None, shifts, _INTERPRETER, card), expected)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.interpreter
def test_a_wrong_shift_or_projection_is_not_exact():
    tokens, heads, extent = 9, 8, 16
    rel_logits, shifts = numbers(tokens, heads, extent, dtype=jnp.bfloat16), shifts_of(tokens)
    other = jnp.where(shifts >= 0, (shifts + 1) % 8, shifts)
    assert (shear.shear(rel_logits, other, True) != shear_rows(rel_logits, shifts)).any()
    r, proj = whole_numbers(tokens, heads, 16), whole_numbers(16, extent, seed=1)
    expected = shear_rows(ip.relative_logits(r, proj), shifts)
    assert (shear.project(r, jnp.roll(proj, 1, axis=1), None, shifts, True) != expected).any()


@pytest.mark.interpreter
def test_the_public_producers_run_the_kernels():
    lengths: dict[str, Any] = {
        "cu_seqlens_q": jnp.array([0, 3, 4], jnp.int32),
        "cache_seqlens": jnp.array([9, 300], jnp.int32),
    }
    r, proj = whole_numbers(5, 2, 16), whole_numbers(16, 16, seed=1)
    plain = ip.relative_logits(r, proj)
    made, expected = ip.shear(plain, **lengths, backend="hopper", interpret=True), ip.shear(plain, **lengths)
    fused = ip.sheared_relative_logits(r, proj, **lengths, backend="hopper", interpret=True)
    assert isinstance(made, ShearedLogits)
    for sheared in (made, fused):
        np.testing.assert_array_equal(sheared.table, expected.table)
        np.testing.assert_array_equal(sheared.shifts, expected.shifts)


def test_auto_takes_the_kernel_where_the_device_and_the_table_allow_it(monkeypatch):
    sources = [
        jnp.ones((2, 1, width), dtype) for width, dtype in [(16, jnp.bfloat16), (16, jnp.float32), (12, jnp.float16)]
    ]
    here = Place(None, is_guess=False)
    taken = lambda: [relative_bias._kernel("auto", False, x, x.shape[2], here, projects=False) for x in sources]  # noqa: E731
    assert taken() == [None, None, None]
    monkeypatch.setattr(relative_bias, "kernels_of", lambda device: ("hopper",))
    assert taken() == [shear, None, None]


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("dtype must be bfloat16 or float16", lambda s: shear.shear(jnp.ones((2, 1, 8)), s, True)),
        ("rel_extent must be a multiple of 8", lambda s: shear.shear(jnp.ones((2, 1, 9), jnp.bfloat16), s, True)),
        ("leave room for 16 rows", lambda s: shear.shear(jnp.ones((2, 1, 4096), jnp.bfloat16), s, True)),
        (
            "r must have d_rel = 16",
            lambda s: shear.project(jnp.ones((2, 1, 8), jnp.bfloat16), jnp.ones((8, 8), jnp.bfloat16), None, s, True),
        ),
    ],
)
def test_what_the_kernels_lack_is_named(message, call):
    with pytest.raises(NotImplementedError, match=message):
        call(jnp.zeros(2, jnp.int32))


def test_a_table_without_rows_needs_no_kernel():
    assert shear.shear(jnp.ones((0, 8, 16), jnp.bfloat16), jnp.zeros(0, jnp.int32), False).shape == (0, 8, 24)


def lower(kernel, tokens, heads, extent, *, tau=False, device=None):
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    shifts = shape(tokens, dtype=jnp.int32)
    if kernel == "shear":
        traced = jax.jit(lambda x, s: shear.shear(x, s, False)).trace(shape(tokens, heads, extent), shifts)
    else:
        factors = shape(tokens, dtype=jnp.float32) if tau else None
        traced = jax.jit(lambda r, proj, t, s: shear.project(r, proj, t, s, False)).trace(
            shape(tokens, heads, 16), shape(16, extent), factors, shifts
        )
    return traced.lower() if device is not None else traced.lower(lowering_platforms=("cuda",))


@pytest.mark.lowering
@pytest.mark.parametrize("kernel", ["shear", "project"])
@pytest.mark.parametrize(("tokens", "heads", "extent"), [(32, 64, 1024), (7, 12, 8)])
def test_lowers_for_cuda_on_any_machine(kernel, tokens, heads, extent):
    assert lower(kernel, tokens, heads, extent, tau=True).as_text().count("custom_call @mosaic_gpu") == 1


# Kernel, table, most registers: two CTAs of 128 threads share an SM.
COMPILED = [
    ("shear", (8192, 64, 1024), 96),
    ("project", (8192, 64, 1024), 168),
    ("project", (8192, 8, 512), 168),
]


@pytest.mark.lowering
@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
@pytest.mark.parametrize(("kernel", "table", "registers"), COMPILED)
def test_compiles_for_sm_90a_without_spills(kernel, table, registers, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    lower(kernel, *table, tau=True, device=absent_card.device()).compile()
    report = "".join(capfd.readouterr())
    (used,) = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert used <= registers
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]


def steps_of(x, phase, count, width):
    """Returns the tiles that `steps` reads, in NumPy: [count, width]."""
    tokens, group, pitch = x.shape
    row = np.minimum(np.arange(count), tokens * group - 1)
    starts = 8 * ((phase + tokens - 1) // 8 - (phase + row // group) // 8)
    return np.asarray(x, np.float32).reshape(-1, pitch)[row[:, None], starts[:, None] + np.arange(width)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("tokens", "group", "pitch", "keys", "phase"), [(8, 8, 136, 128, 3), (16, 3, 88, 64, 0), (64, 1, 136, 64, 7)]
)
def test_steps_of_rows(way, tokens, group, pitch, keys, phase):
    x = numbers(tokens, group, pitch, dtype=jnp.bfloat16)
    read = lambda ref: sheared_loads.load_rows(ref, jnp.int32(phase), keys, interpret=bool(way))  # noqa: E731
    expect(through_smem(read, way, x, 64, keys), steps_of(x, phase, 64, keys))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("tokens", "group", "pitch", "keys", "columns", "phase"),
    [(1, 8, 136, 128, 8, 5), (4, 4, 72, 64, 16, 6), (2, 3, 96, 64, 8, 7), (8, 8, 136, 128, 64, 1)],
)
def test_steps_of_columns(way, tokens, group, pitch, keys, columns, phase):
    x = numbers(tokens, group, pitch, dtype=jnp.bfloat16)
    read = lambda ref: sheared_loads.load_columns(ref, jnp.int32(phase), (keys, columns), interpret=bool(way))  # noqa: E731
    expect(through_smem(read, way, x, keys, columns), steps_of(x, phase, columns, keys).T)


# Rows of 6 heads, of whose first token 4 stand in tiles before; the second token is of no sequence.
SHIFTS, HEADS, OFFSET = (3, -1, 0, 7), 6, 4
OF_ROWS = np.array(SHIFTS)[(OFFSET + np.arange(16)) // HEADS]


def written_tile(write, way, width, *inputs, taus=None):
    """Returns the tile [16, width] that `write` makes of inputs in plain SMEM, or None where it is only lowered."""
    scalar = lambda x, dtype: jnp.full((), x, dtype)  # noqa: E731
    count = len(inputs)

    def body(*refs):
        table, out, ready = refs[count], refs[-2], refs[-1]
        places = refs[count + 1 : -2]
        for source, place in zip(refs[:count], places, strict=True):
            plgpu.copy_gmem_to_smem(source, place, ready)
        plgpu.barrier_wait(ready)
        tokens = tile_rows.Tokens(
            offset=scalar(OFFSET, jnp.int32),
            shifts=[scalar(shift, jnp.int32) for shift in SHIFTS],
            taus=None if taus is None else [scalar(tau, jnp.float32) for tau in taus],
        )
        write(out, *places, tokens, heads=HEADS, interpret=bool(way))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, table)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(x.shape, x.dtype) for x in inputs]
    scratch += [plgpu.SMEM((16, width), inputs[0].dtype), plgpu.Barrier(num_arrivals=count)]
    return run(body, way, result(16, width, dtype=inputs[0].dtype), *inputs, scratch=scratch)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("extent", [8, 64, 200])
def test_a_tile_turned(way, extent):
    x = numbers(16, extent, dtype=jnp.bfloat16)
    table = shear_rows(x[:, None], jnp.asarray(OF_ROWS, jnp.int32))[:, 0]
    expect(written_tile(tile_rows.write_turned, way, table.shape[1], x), table)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("extent", "taus"), [(8, None), (64, (1.0, 5.0, 2.0, 3.0)), (200, None)])
def test_a_tile_of_products(way, extent, taus):
    r, proj = whole_numbers(16, 16), whole_numbers(16, extent, seed=1)
    factors = None if taus is None else jnp.asarray(taus, jnp.float32)[(OFFSET + np.arange(16)) // HEADS]
    plain = ip.relative_logits(r[:, None], proj, factors)
    table = shear_rows(plain, jnp.asarray(OF_ROWS, jnp.int32))[:, 0]
    columns = jnp.zeros((table.shape[1] + 8, 16), jnp.bfloat16).at[8 : 8 + extent].set(proj[:, ::-1].T)
    halves = columns.reshape(-1, 2, 8).transpose(1, 0, 2)
    write = lambda out, queries, halves, *more, **kw: tile_rows.write_products(out, halves, queries, *more, **kw)  # noqa: E731
    expect(written_tile(write, way, table.shape[1], r, halves, taus=taus), table)
