"""How inline code is tried: its twin in the interpreter, the code itself on a card, and lowering everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels import mosaic

WAYS = [
    pytest.param(True, id="twin", marks=pytest.mark.interpreter),
    pytest.param(False, id="card", marks=pytest.mark.gpu),
    pytest.param(None, id="lowering", marks=pytest.mark.lowering),
]


def prepared(body, way, result, *, scratch=()):
    """Returns a function of body's inputs that gives its output, or None where it is only lowered."""
    kernel = mosaic.kernel(
        body, interpret=bool(way), out_type=result, grid=(1,), grid_names=("cta",), num_threads=1, scratch_types=scratch
    )
    kernel = jax.jit(kernel)
    lower = functools.cache(lambda *shapes: kernel.trace(*shapes).lower(lowering_platforms=("cuda",)))

    def call(*inputs):
        if way is not None:
            return np.asarray(kernel(*inputs))
        lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs))
        return None

    return call


def lowered(body, result, *inputs, scratch=()):
    """Returns body lowered for a card."""
    kernel = mosaic.kernel(
        body, interpret=False, out_type=result, grid=(1,), grid_names=("cta",), num_threads=1, scratch_types=scratch
    )
    return jax.jit(kernel).trace(*inputs).lower(lowering_platforms=("cuda",))


def run(body, way, result, *inputs, scratch=()):
    """Returns body's output, or None where it is only lowered."""
    return prepared(body, way, result, scratch=scratch)(*inputs)


def numbers(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def result(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def expect(actual, expected):
    if actual is not None:
        np.testing.assert_array_equal(actual, np.asarray(expected))


def through_smem(read, way, x, *shape):
    """Returns what `read` makes of x in plain SMEM."""

    def body(x, out, x_smem, ready):
        plgpu.copy_gmem_to_smem(x, x_smem, ready)
        plgpu.barrier_wait(ready)
        out[...] = read(x_smem).astype(jnp.float32)

    return run(body, way, result(*shape), x, scratch=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()])
