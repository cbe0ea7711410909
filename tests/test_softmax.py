"""The kernels' softmax, pure functions on arrays, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from inkling_pallas.kernels.phases import softmax

pytestmark = pytest.mark.host

ROWS, KEYS, TILE = 8, 256, 64
# The largest score is of a key whose value is 0: what is left are weights of 2**-20 to 2**-25 of it.
NATS = (14.0, 16.0, 17.4)


def sink(nats):
    """Scores [rows, keys] in nats and values [keys, 16]: one key far above the others, with value 0."""
    rng = np.random.default_rng(0)
    scores = (0.1 * rng.standard_normal((ROWS, KEYS))).astype(np.float32)
    scores[:, 100] = scores.max() + nats
    values = rng.standard_normal((KEYS, 16)).astype(np.float32)
    values[100] = 0
    weights = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return scores, values, weights @ values / weights.sum(axis=1, keepdims=True)


def by_column(scores, values, dtype):
    """As the decode kernel does it."""
    state = softmax.State(
        acc=jnp.zeros((values.shape[1], ROWS)),
        reference_log2=jnp.full((ROWS,), -jnp.inf),
        weight=jnp.zeros((TILE, ROWS)),
    )
    for first in range(0, KEYS, TILE):
        keys = slice(first, first + TILE)
        tile = jnp.asarray(scores[:, keys].T * np.float32(softmax.LOG2_E))
        state, weights = softmax.absorb(state, tile, dtype)
        rounded = np.asarray(weights.astype(dtype), np.float32)
        assert np.isfinite(rounded).all()
        state = state._replace(acc=state.acc + values[keys].T @ rounded)
    return np.asarray(softmax.finish(state)[0]).T


def by_row(scores, values, dtype):
    """As the prefill kernel does it."""
    state = softmax.RowState(
        acc=jnp.zeros((ROWS, values.shape[1])),
        reference_log2=jnp.full((ROWS,), -jnp.inf),
        weight=jnp.zeros((ROWS, 8)),
    )
    for first in range(0, KEYS, TILE):
        keys = slice(first, first + TILE)
        after, reference, decay = softmax.raise_reference(
            state.reference_log2, jnp.asarray(scores[:, keys]).max(axis=1), dtype
        )
        weights = softmax.row_weights(jnp.asarray(scores[:, keys]), reference)
        rounded = np.asarray(weights.astype(dtype), np.float32)
        assert np.isfinite(rounded).all()
        acc = state.acc * softmax.along_rows(decay, values.shape[1]) + rounded @ values[keys]
        state = softmax.RowState(acc, after, softmax.add_weights(state.weight, decay, weights))
    return np.asarray(softmax.finish_rows(state)[0])


@pytest.mark.parametrize("way", [by_column, by_row])
@pytest.mark.parametrize("nats", NATS)
def test_weights_far_below_the_largest_count_in_float16(way, nats):
    scores, values, expected = sink(nats)
    error = np.abs(way(scores, values, "float16") - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() < 1.5e-3


@pytest.mark.parametrize("way", [by_column, by_row])
def test_without_headroom_they_do_not(way, monkeypatch):
    monkeypatch.setitem(softmax._HEADROOM_LOG2, "float16", 0.0)
    monkeypatch.setitem(softmax._LAZY_LOG2, "float16", (0.0, 8.0))
    scores, values, expected = sink(17.4)
    error = np.abs(way(scores, values, "float16") - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() > 0.05


def test_chunks_are_masked_by_their_bits():
    scores = jnp.zeros((2, 64))
    chunk = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32)[None] // 16, (2, 64))
    masked = np.asarray(softmax.mask_chunks(scores, chunk, jnp.int32(0b1010)))
    np.testing.assert_array_equal(np.isneginf(masked[0]), np.isin(np.arange(64) // 16, [1, 3]))
