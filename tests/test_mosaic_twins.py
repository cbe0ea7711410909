"""Each piece of inline code against NumPy.

Its twin in the interpreter, the code itself on a card, and lowering everywhere.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from twins import WAYS, expect, lowered, numbers, prepared, result, run

from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.phases import epilogue


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vectors", ["separate", "neighbours", "shared"])
def test_gather(way, vectors):
    x, shape = numbers(12, 32), (8, 32)
    layout = mosaic.strided(shape, 2)

    def body(x, out):
        row, column = (mosaic.iota(shape, axis, layout) for axis in (0, 1))
        column = {"separate": 31 - column, "neighbours": column, "shared": jnp.zeros_like(column)}[vectors]
        out[...] = mosaic.gather(x, row + 3, column, layout=layout, vectors=vectors, interpret=bool(way))

    window = x[3:11]
    expected = {"separate": window[:, ::-1], "neighbours": window, "shared": jnp.broadcast_to(window[:, :1], shape)}
    expect(run(body, way, result(*shape), x), expected[vectors])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("keys", "columns", "pitch"), [(64, 8, 80), (128, 16, 136), (128, 32, 144)])
def test_gather_descending(way, keys, columns, pitch):
    x = numbers(columns, pitch, dtype=jnp.bfloat16)

    def body(x, out, x_smem, ready):
        plgpu.copy_gmem_to_smem(x, x_smem, ready)
        plgpu.barrier_wait(ready)
        column = mosaic.iota((columns,), 0, mosaic.WGMMA.reduce(0))
        values = mosaic.gather_descending(x_smem, column * pitch + keys + 1, keys, interpret=bool(way))
        out[...] = values.astype(jnp.float32)

    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    key, column = np.arange(keys)[:, None], np.arange(columns)[None]
    expected = np.asarray(x, np.float32)[column, keys + 1 - key]
    expect(run(body, way, result(keys, columns), x, scratch=scratch), expected)


def through_operand(write, way, rows, columns, dtype):
    """Writes a matrix operand in SMEM with `write`, and returns what a matrix product and the copy engine see in it."""

    def body(eye, out, operand, eye_smem, ready):
        plgpu.copy_gmem_to_smem(eye, eye_smem, ready)
        plgpu.barrier_wait(ready)
        write(operand)
        plgpu.commit_smem()
        product, _ = mosaic.matmul(eye_smem, operand.T, rows=columns, columns=rows)
        out[...] = product

    scratch = [mosaic.swizzled((rows, columns), dtype), mosaic.swizzled((columns, columns), dtype), plgpu.Barrier()]
    actual = run(body, way, result(columns, rows), jnp.eye(columns, dtype=dtype), scratch=scratch)
    return None if actual is None else actual.T


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "columns"), [(8, 64), (16, 128), (64, 64)])
def test_store_operand(way, rows, columns):
    def write(operand):
        layout = mosaic.strided((rows, columns), 4)
        row, column = (mosaic.iota((rows, columns), axis, layout) for axis in (0, 1))
        x = (row * 3 + column).astype(jnp.float32).astype(jnp.bfloat16)
        mosaic.store_operand(operand, x, layout=layout, interpret=bool(way))

    expected = (np.arange(rows)[:, None] * 3 + np.arange(columns)).astype(jnp.bfloat16)
    expect(through_operand(write, way, rows, columns, jnp.bfloat16), expected.astype(np.float32))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("keys", "columns"), [(64, 8), (64, 24), (128, 8), (128, 32), (64, 64)])
def test_store_transposed(way, keys, columns, dtype):
    def write(operand):
        key, column = (mosaic.iota((keys, columns), axis, mosaic.WGMMA) for axis in (0, 1))
        mosaic.store_transposed(operand, (key - 2 * column).astype(jnp.float32).astype(dtype), interpret=bool(way))

    expected = (np.arange(keys)[None] - 2 * np.arange(columns)[:, None]).astype(dtype)
    expect(through_operand(write, way, columns, keys, dtype), expected.astype(np.float32))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (128, 128), (64, 256)])
def test_clear_rows_outside(way, rows, columns):
    x = jnp.asarray(np.random.default_rng(1).integers(1, 9, (rows, columns)), jnp.bfloat16)

    def body(x, live, out, operand, ready):
        plgpu.copy_gmem_to_smem(x, operand, ready)
        plgpu.barrier_wait(ready)
        mosaic.clear_rows_outside(operand, live[0], live[1], interpret=bool(way))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(operand, out)
        plgpu.wait_smem_to_gmem(0)

    scratch = [mosaic.swizzled((rows, columns), x.dtype), plgpu.Barrier()]
    clear = prepared(body, way, result(rows, columns, dtype=x.dtype), scratch=scratch)
    row = np.arange(rows)[:, None]
    for first, end in [(0, 1), (17, 40), (5, 64), (-9, 200), (70, 0)]:
        expected = np.where((row >= first) & (row < end), np.asarray(x), 0).astype(x.dtype)
        expect(clear(x, jnp.array([first, end], jnp.int32)), expected)


def _end_of(start, end):
    return jnp.where(start <= end, end, jnp.zeros_like(end))


def _facts_of(start, end, claimed, length):
    return jnp.maximum(start, claimed), end - start, lax.rem(length, 9), jnp.clip(length, 3, 500), lax.div(length, 7)


def _scan(offsets, lengths, out, table, *, way):
    batch = table.shape[1]
    rules: Any = {"end_of": _end_of, "facts_of": _facts_of}
    mosaic.scan_table([offsets, lengths], table, **rules, interpret=bool(way))
    for row in range(7):
        word = mosaic.read_word(table, row, batch - 1, interpret=bool(way))
        middle = mosaic.read_word(table, row, batch // 2, interpret=bool(way))
        out[row] = word + 3 * middle


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 2, 5, 31, 32, 33, 300, 513, 1024, 4096])
def test_scan_table_and_read_word(way, batch):
    offsets, lengths = (np.random.default_rng(i).integers(-9, 1000, batch + 1).astype(np.int32) for i in (0, 1))
    start, end = offsets[:-1], offsets[1:]
    claimed = np.maximum.accumulate([0, *np.where(start <= end, end, 0)])[:-1].astype(np.int32)
    *facts, work = (np.asarray(x) for x in _facts_of(start, end, claimed, lengths[:-1]))
    words = np.stack([*facts, np.cumsum(work), np.maximum.accumulate(facts[0] + facts[1]), np.maximum.accumulate(work)])
    scratch = [plgpu.SMEM((7, batch), jnp.int32)]
    arrays = jnp.asarray(offsets), jnp.asarray(lengths[:-1])
    actual = run(functools.partial(_scan, way=way), way, result(7, dtype=jnp.int32), *arrays, scratch=scratch)
    expect(actual, words[:, -1] + 3 * words[:, batch // 2])


@pytest.mark.lowering
def test_the_code_of_a_scan_does_not_grow_with_large_batches():
    def size(batch):
        scratch = [plgpu.SMEM((7, batch), jnp.int32)]
        kernel = lowered(
            functools.partial(_scan, way=False),
            result(7, dtype=jnp.int32),
            result(batch + 1, dtype=jnp.int32),
            result(batch, dtype=jnp.int32),
            scratch=scratch,
        )
        return len(kernel.as_text())

    assert size(4096) < 1.1 * size(512)


@pytest.mark.parametrize("way", WAYS)
def test_matmul_onto(way):
    a, b = (jnp.asarray(np.random.default_rng(i).integers(-4, 5, (64, 64)), jnp.bfloat16) for i in (0, 1))

    def body(a, b, out, a_smem, b_smem, ready):
        plgpu.copy_gmem_to_smem(a, a_smem, ready)
        plgpu.copy_gmem_to_smem(b, b_smem, ready)
        plgpu.barrier_wait(ready)
        product, _ = mosaic.matmul(a_smem, b_smem, rows=64, columns=64)
        out[...] = mosaic.matmul_onto(product * 2.0, a_smem, b_smem, interpret=bool(way))

    operand = mosaic.swizzled((64, 64), jnp.bfloat16)
    scratch = [operand, operand, plgpu.Barrier(num_arrivals=2)]
    expected = 3 * np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    expect(run(body, way, result(64, 64), a, b, scratch=scratch), expected)


class Way(NamedTuple):
    """All that the stores ask of a tiling."""

    interpret: bool


def tiling(way) -> Any:
    return Way(bool(way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("width", "columns", "live"), [(64, 8, 8), (128, 24, 5), (256, 16, 0)])
def test_store_columns(way, dtype, width, columns, live):
    def body(out):
        element, column = (mosaic.iota((width, columns), axis, mosaic.WGMMA) for axis in (0, 1))
        x = (element - 2 * column).astype(jnp.float32)
        epilogue.store_columns(out, x, lambda r: 2 * r + 1, jnp.int32(live), tiling(way))

    actual = run(body, way, result(2 * columns, width, dtype=dtype))
    expected = (np.arange(width)[None] - 2 * np.arange(columns)[:, None])[:live].astype(dtype)
    expect(None if actual is None else actual[1 : 2 * live : 2], expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("columns", "live"), [(8, 3), (32, 32)])
def test_store_scalars(way, columns, live):
    def body(out):
        x = mosaic.iota((columns,), 0, mosaic.WGMMA_COLUMNS).astype(jnp.float32)
        epilogue.store_scalars(out, x, lambda r: 2 * r + 1, jnp.int32(live), tiling(way))

    actual = run(body, way, result(2 * columns, 1))
    expect(None if actual is None else actual[1 : 2 * live : 2, 0], np.arange(live, dtype=np.float32))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scalars", [False, True])
def test_store_rows(way, scalars):
    shape, live = (8, 64), 5
    layout = mosaic.strided(shape, 4)

    def body(out):
        row, element = (mosaic.iota(shape, axis, layout) for axis in (0, 1))
        x = (100 * row + element).astype(jnp.float32)
        store = epilogue.store_row_scalars if scalars else epilogue.store_rows
        store(out, x, lambda r: r + 2, jnp.int32(live), layout, tiling(way))

    actual = run(body, way, result(16, 1 if scalars else 64))
    expected = (100 * np.arange(live)[:, None] + np.arange(1 if scalars else 64)).astype(np.float32)
    expect(None if actual is None else actual[2 : 2 + live], expected)
