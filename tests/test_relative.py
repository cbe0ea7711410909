"""Relative logits, log scaling and the merge of parts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inkling_pallas as ip
from inkling_pallas.testing import row_errors


def test_relative_logits_against_numpy():
    rng = np.random.default_rng(0)
    r, proj = rng.standard_normal((5, 4, 16), np.float32), rng.standard_normal((16, 40), np.float32)
    tau = np.linspace(1, 1.3, 5, dtype=np.float32)
    expected = np.einsum("thd,de,t->the", r.astype(np.float64), proj.astype(np.float64), tau.astype(np.float64))
    table = ip.relative_logits(jnp.asarray(r), jnp.asarray(proj), jnp.asarray(tau))
    assert row_errors(table, expected).max() < 1e-6
    low = ip.relative_logits(jnp.asarray(r, jnp.bfloat16), jnp.asarray(proj, jnp.bfloat16), jnp.asarray(tau))
    chex.assert_type(low, jnp.bfloat16)
    assert row_errors(low, expected).max() < 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((jnp.ones((2, 3, 16)), jnp.ones((8, 16))), "proj must have shape"),
        ((jnp.ones((2, 3, 16)), jnp.ones((16, 8), jnp.bfloat16)), "proj must have the dtype of r"),
        ((jnp.ones((2, 3, 16)), jnp.ones((16, 8)), jnp.ones((3,))), "tau must be float32 of shape"),
    ],
)
def test_relative_logits_refuses(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        ip.relative_logits(*arguments)


def test_log_scaling_values():
    tau = ip.log_scaling(jnp.array([0, 127_999, 128_000, 999_999], jnp.int32))
    chex.assert_type(tau, jnp.float32)
    assert float(tau[0]) == float(tau[1]) == 1.0
    assert float(tau[2]) >= 1.0
    assert round(float(tau[3]), 5) == 1.20557
    assert float(ip.log_scaling(jnp.array([19]), n_floor=10, alpha=1.0)[0]) == pytest.approx(1 + np.log(2))


def _parts(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 6, 2, 8), np.float32), 3 * rng.standard_normal((count, 6, 2), np.float32)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_merge_is_within_1e5_of_float64(count):
    outs, lses = _parts(count)
    lses[0, 0] = -np.inf
    lses[:, 1] = -np.inf
    outs[:, 1] = np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(lses.astype(np.float64))
        expected = np.nan_to_num(
            (weights[..., None] * np.nan_to_num(outs.astype(np.float64))).sum(0) / weights.sum(0)[..., None]
        )
        expected_lse = np.log(weights.sum(0))
    out, lse = ip.merge_partials(list(map(jnp.asarray, outs)), list(map(jnp.asarray, lses)))
    assert row_errors(out, expected).max() < 1e-5
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    assert not np.asarray(out[1]).any()


def test_merge_keeps_the_dtype_and_takes_vmap_and_large_lses():
    outs, lses = (jnp.asarray(x) for x in _parts(3))
    chex.assert_type(ip.merge_partials(outs.astype(jnp.bfloat16), lses)[0], jnp.bfloat16)
    mapped = jax.vmap(ip.merge_partials)(jnp.stack([outs, outs]), jnp.stack([lses, lses + 1e4]))
    # At 1e4 the spacing of float32 LSEs is about 1e-3.
    chex.assert_trees_all_close(mapped[0][0], mapped[0][1], atol=2e-3)
    assert jnp.isfinite(mapped[1]).all()


def test_merge_refuses():
    outs, lses = _parts(2)
    with pytest.raises(ValueError, match=r"^lses must be as many as outs, at least one; got 1 for 2 outs"):
        ip.merge_partials(jnp.asarray(outs), jnp.asarray(lses[:1]))
    with pytest.raises(ValueError, match=r"^lses must have shape"):
        ip.merge_partials(jnp.asarray(outs), jnp.asarray(lses[:, :3]))
    with pytest.raises(ValueError, match=r"^outs must have shape \(parts, num_tokens, num_heads, head_dim\); got"):
        ip.merge_partials(jnp.asarray(outs[0]), jnp.asarray(lses[0]))


def test_merge_computes_in_float32_whatever_the_lses_are():
    outs = jnp.stack([jnp.zeros((1, 1, 8)), jnp.ones((1, 1, 8))])
    lses = jnp.array([[[5.0]], [[5.0625]]], jnp.bfloat16)
    out, lse = ip.merge_partials(outs, lses)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-0.0625)), rtol=1e-6)
