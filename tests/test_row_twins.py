"""Each piece of inline code for tiles whose rows are query rows against NumPy: its twin, on a card, and lowering."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from twins import WAYS, expect, numbers, result, run, through_smem

from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.mosaic import wgmma_rows


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("group", "pitch", "width"), [(8, 152, 128), (8, 136, 128), (3, 72, 64)])
def test_load(way, dtype, group, pitch, width):
    tokens = 8 if group == 8 else 16
    x = numbers(tokens, group, pitch, dtype=dtype)
    live = tokens * group
    actual = through_smem(lambda ref: wgmma_rows.load(ref, live, width, interpret=bool(way)), way, x, 64, width)
    flat = np.asarray(x, np.float32).reshape(live, pitch)[:, :width]
    expect(actual, flat[np.minimum(np.arange(64), live - 1)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("keys", "pitch"), [(64, 88), (128, 152)])
def test_gather_descending(way, keys, pitch):
    x = numbers(64, pitch, dtype=jnp.bfloat16)

    def read(ref):
        row = mosaic.iota((64,), 0, mosaic.WGMMA_ROWS)
        starts = row * pitch + keys + row // 8
        return wgmma_rows.gather_descending(ref, starts, keys, interpret=bool(way))

    row, key = np.arange(64)[:, None], np.arange(keys)[None]
    expected = np.asarray(x, np.float32)[row, keys + row // 8 - key]
    expect(through_smem(read, way, x, 64, keys), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keys", [64, 128])
def test_masks(way, keys):
    x = numbers(64, keys)

    def read(ref):
        scores = plgpu.load(ref, layout=mosaic.WGMMA, optimized=False)
        row = mosaic.iota((64,), 0, mosaic.WGMMA_ROWS)
        scores = wgmma_rows.keep_before(scores, row + 20, interpret=bool(way))
        return wgmma_rows.keep_from(scores, row - 10, interpret=bool(way))

    row, key = np.arange(64)[:, None], np.arange(keys)[None]
    expected = np.where((key < row + 20) & (key >= row - 10), np.asarray(x), -np.inf)
    expect(through_smem(read, way, x, 64, keys), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [8, 32])
def test_drop_chunks(way, chunk):
    x = numbers(64, 128)

    def read(ref):
        scores = plgpu.load(ref, layout=mosaic.WGMMA, optimized=False)
        return wgmma_rows.drop_chunks(scores, jnp.int32(0b0101), chunk, -7.0, interpret=bool(way))

    dropped = np.isin(np.arange(128) // chunk, [0, 2])
    expect(through_smem(read, way, x, 64, 128), np.where(dropped, -7.0, np.asarray(x)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first_row", [0, 16, 47, 64])
def test_rescale(way, first_row):
    x = numbers(64, 128)

    def read(ref):
        row = mosaic.iota((64,), 0, mosaic.WGMMA_ROWS)
        decay = jnp.where(
            row < first_row, jnp.full((64,), 1.0), jnp.full((64,), 0.5)
        )  # the rows of some warps are all 1
        values = plgpu.load(ref, layout=mosaic.WGMMA, optimized=False)
        return wgmma_rows.rescale(values, plgpu.layout_cast(decay, mosaic.WGMMA_ROWS), interpret=bool(way))

    expect(through_smem(read, way, x, 64, 128), np.where(np.arange(64)[:, None] < first_row, 1, 0.5) * np.asarray(x))


@pytest.mark.parametrize("way", [way for way in WAYS if way.id != "twin"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("width", [64, 128])
def test_scatter(way, dtype, width):
    def body(x, out, x_smem, ready):
        plgpu.copy_gmem_to_smem(x, x_smem, ready)
        plgpu.barrier_wait(ready)
        values = plgpu.load(x_smem, layout=mosaic.WGMMA, optimized=False)
        row = mosaic.iota((64,), 0, mosaic.WGMMA_ROWS)
        wgmma_rows.scatter(out, jnp.where(row < 40, 63 - row, -1), values.astype(dtype))

    x = numbers(64, width)
    actual = run(body, way, result(64, width, dtype=dtype), x, scratch=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()])
    if actual is not None:
        np.testing.assert_array_equal(actual[24:], np.asarray(x.astype(dtype))[:40][::-1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("starts", [False, True])
def test_products_from_registers(way, starts):
    x, keys, start = (numbers(64, n, dtype=jnp.bfloat16, seed=n) for n in (64, 128, 192))
    keys, start = keys.reshape(128, 64), start[:, :128].astype(jnp.float32)

    def body(x, keys, start, out, x_smem, keys_smem, start_smem, ready):
        for source, target in ((x, x_smem), (keys, keys_smem), (start, start_smem)):
            plgpu.copy_gmem_to_smem(source, target, ready)
        plgpu.barrier_wait(ready)
        interpret = bool(way)
        values = wgmma_rows.load(x_smem, 64, 64, interpret=interpret)
        first = plgpu.load(start_smem, layout=mosaic.WGMMA, optimized=False) if starts else None
        scores, _ = wgmma_rows.scores_of(values, keys_smem, start=first, meanwhile=lambda: None, interpret=interpret)
        total = mosaic.full((64,), 1.0, jnp.float32, mosaic.WGMMA_ROWS)
        acc = mosaic.full((64, 64), 1.0, jnp.float32, mosaic.WGMMA)
        weights = scores.astype(jnp.bfloat16)
        acc, total = wgmma_rows.add_product(acc, weights, keys_smem, total, lambda t: t * 2.0, interpret=interpret)
        out[...] = acc * jnp.broadcast_to(total[:, None], acc.shape) if interpret else acc * 2.0

    scratch = [
        plgpu.SMEM(x.shape, x.dtype),
        mosaic.swizzled(keys.shape, keys.dtype),
        plgpu.SMEM(start.shape, start.dtype),
        plgpu.Barrier(num_arrivals=3),
    ]
    actual = run(body, way, result(64, 64), x, keys, start, scratch=scratch)
    if actual is not None:
        a, b = (np.asarray(v, np.float64) for v in (x, keys))
        scores = a @ b.T + (np.asarray(start, np.float64) if starts else 0)
        expected = 2 * (1 + scores @ b)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("way", WAYS)
def test_stay_before_changes_no_value(way):
    def body(x, out, x_smem, ready):
        plgpu.copy_gmem_to_smem(x, x_smem, ready)
        plgpu.barrier_wait(ready)
        values = plgpu.load(x_smem, layout=mosaic.WGMMA, optimized=False)
        wgmma_rows.stay_before(jnp.abs(values).sum(axis=1), interpret=bool(way))
        out[...] = values

    x = numbers(64, 64)
    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    expect(run(body, way, result(64, 64), x, scratch=scratch), np.asarray(x))
