"""The operator as the attention of Hugging Face's own Inkling, where torch and transformers are installed."""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="torch or transformers is missing (extra hf)",
)


@pytest.mark.parametrize("layout", ["separate", "packed", "interleaved"])
def test_the_small_model_chooses_the_same_tokens(layout):
    import hf_client

    assert hf_client.run("small", device=_device(), layout=layout, backend="portable").failures == []


def test_a_model_without_its_bias_is_caught(monkeypatch):
    import hf_attention
    import hf_client

    by_distance = hf_attention._bias_by_distance
    monkeypatch.setattr(hf_attention, "_bias_by_distance", lambda *args: 0 * by_distance(*args))
    small, kernels = (hf_client.run(name, device=_device(), backend="portable") for name in ("small", "kernels"))
    assert any("is the largest" in failure for failure in small.failures)
    assert len(kernels.failures) > 5


def test_a_backend_that_was_not_expected_is_named():
    import hf_client

    outcome = hf_client.run("small", device=_device(), backend="portable", expect="hopper")
    assert any("is not for hopper" in failure for failure in outcome.failures)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["separate", "packed", "interleaved"])
def test_the_kernels_take_the_larger_model(layout):
    import hf_client

    assert hf_client.run("kernels", device="cuda", layout=layout, expect="hopper").failures == []


def _device() -> str:
    import jax

    return "cuda" if jax.default_backend() == "gpu" else "cpu"
