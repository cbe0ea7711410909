"""The decoder step of `inkling_block` against golden files from Hugging Face's Inkling, token by token."""

import dataclasses
from pathlib import Path
from typing import Any

import inkling_block
import inkling_weights
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inkling_block import Kind, Model

import inkling_pallas as ip

PATH = Path(__file__).parent / "golden" / "inkling_small.npz"
MADE_WITH = "5.17.0"  # transformers' version; make_golden.py writes the file
LIMIT = 2e-5  # absolute, of numbers around 1

_LOCAL = Kind(num_heads=4, num_kv_heads=2, head_dim=32, rel_extent=16, is_local=True)
_GLOBAL = dataclasses.replace(_LOCAL, rel_extent=48, is_local=False)
MODEL = Model(
    kinds=(_LOCAL,) * 5 + (_GLOBAL,),
    log_scaling_floor=32,
    experts_per_token=2,
    route_scale=2.0,
    logits_divisor=2.0,
)
BLOCK_SIZE = 8
# Rows of each sequence in each step: prompts whole and a chunk, the rest of it beside decodes, then decodes alone. A
# sequence that is at its end has none.
STEPS = ((40, 17, 5), (30, 1, 1), *((1, 1, 1),) * 7, (1, 0, 0))
BUCKETS = ip.Buckets(num_tokens=(4, 64), batch_size=(4,), max_seqlen_q=(1, 64), max_blocks=(10,))


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(PATH) as file:
        return dict(file)


@pytest.fixture(scope="module")
def weights(golden) -> inkling_block.Weights:
    names = {name.removeprefix("weights/"): array for name, array in golden.items() if name.startswith("weights/")}
    return inkling_weights.take_weights(names, len(MODEL.kinds))


def of_sequence(golden: dict[str, np.ndarray], sequence: int, name: str) -> np.ndarray:
    return golden[f"sequence{sequence}/{name}"]


def serve(
    weights: inkling_block.Weights,
    golden: dict[str, np.ndarray],
    steps: tuple[tuple[int, ...], ...] = STEPS,
    model: Model = MODEL,
) -> tuple[list[Any], list[Any]]:
    """Serves the prompts greedily; returns each sequence's tokens, and its rows' logits and layers by name."""
    state = inkling_block.empty_state(model, weights, batch_size=4, num_blocks=40, block_size=BLOCK_SIZE)
    tokens = [of_sequence(golden, i, "tokens")[: of_sequence(golden, i, "prompt")].tolist() for i in range(3)]
    pages = np.random.default_rng(0).permutation(40)[:30].reshape(3, 10)
    done, rows = np.zeros(3, int), [[] for _ in tokens]
    for q_lens in steps:
        batch = ip.make_batch(
            list(q_lens), (done + q_lens).tolist(), block_size=BLOCK_SIZE, block_tables=pages.tolist(), buckets=BUCKETS
        )
        new = [t for ids, start, count in zip(tokens, done, q_lens, strict=True) for t in ids[start : start + count]]
        ids = jnp.asarray(batch.pad_rows(np.array(new, np.int32)))
        logits, state, seen = inkling_block.decoder_step(model, weights, state, ids, batch)
        results = {"logits": logits} | {f"layer{i}/{k}": x for i, s in enumerate(seen) for k, x in s._asdict().items()}
        done = done + q_lens
        for i, ids in enumerate(tokens):
            mine = slice(*batch.cu_seqlens_q[i : i + 2])
            rows[i].append({name: np.asarray(x[mine]) for name, x in results.items()})
            if q_lens[i] and done[i] == len(ids):
                ids.append(int(rows[i][-1]["logits"][-1].argmax()))
    return tokens, [{name: np.concatenate([step[name] for step in steps]) for name in steps[0]} for steps in rows]


@pytest.fixture(scope="module")
def served(weights, golden) -> tuple[list[Any], list[Any]]:
    return serve(weights, golden)


def test_the_golden_file_is_of_a_known_transformers_and_small(golden):
    assert str(golden["transformers"]) == MADE_WITH
    assert PATH.stat().st_size < 5_000_000


def test_greedy_tokens_are_those_of_transformers(served, golden):
    for i, ids in enumerate(served[0]):
        assert ids[:-1] == of_sequence(golden, i, "tokens").tolist()


@pytest.mark.parametrize("layer", range(len(MODEL.kinds)))
def test_what_attention_takes_and_gives_is_that_of_transformers(served, golden, layer):
    for i, rows in enumerate(served[1]):
        for name in inkling_block.Seen._fields:
            wanted = of_sequence(golden, i, f"layer{layer}/{name}")
            got = rows[f"layer{layer}/{name}"]
            if name == "rel_logits":  # theirs is known where a row has a key at that distance
                got = np.where((np.arange(got.shape[2]) <= np.arange(len(got))[:, None])[:, None], got, 0)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=LIMIT, err_msg=f"sequence {i}, {name}")


def test_logits_are_those_of_transformers(served, golden):
    for i, rows in enumerate(served[1]):
        np.testing.assert_allclose(rows["logits"], of_sequence(golden, i, "logits"), rtol=0, atol=LIMIT)


def worst_logit(rows: list[Any], golden: dict[str, np.ndarray]) -> float:
    """Returns the largest error of the logits of the rows that were served."""
    errors = [np.abs(r["logits"] - of_sequence(golden, i, "logits")[: len(r["logits"])]) for i, r in enumerate(rows)]
    return float(max(error.max() for error in errors))


@pytest.mark.slow
def test_a_step_with_one_wrong_weight_is_caught(weights, golden):
    names = {name for layer in weights["layers"] for name in layer}
    assert worst_logit(serve(weights, golden, STEPS[:1])[1], golden) <= LIMIT
    for name in sorted(names):
        changed = [layer | {name: jnp.flip(layer[name])} if name in layer else layer for layer in weights["layers"]]
        if name.endswith("_scale"):  # one number
            changed = [layer | {name: 1.1 * layer[name]} if name in layer else layer for layer in weights["layers"]]
        _, rows = serve(weights | {"layers": changed}, golden, STEPS[:1])
        assert worst_logit(rows, golden) > 10 * LIMIT, name


@pytest.mark.slow
def test_a_step_without_log_scaling_is_caught(weights, golden):
    model = dataclasses.replace(MODEL, log_scaling_floor=1000)
    assert worst_logit(serve(weights, golden, STEPS[:1], model)[1], golden) > 10 * LIMIT


@pytest.mark.slow
def test_a_step_that_forgets_its_history_is_caught(weights, golden, monkeypatch):
    empty = inkling_block.empty_state(MODEL, weights, batch_size=4, num_blocks=40, block_size=BLOCK_SIZE)
    zeros = [layer.history for layer in empty]
    step = inkling_block.decoder_step

    def forgetful(model: Model, weights: Any, state: Any, tokens: Any, batch: ip.Batch) -> Any:
        state = [layer._replace(history=old) for layer, old in zip(state, zeros, strict=True)]
        return step(model, weights, jax.tree.map(jnp.copy, state), tokens, batch)

    monkeypatch.setattr(inkling_block, "decoder_step", forgetful)
    assert worst_logit(serve(weights, golden, STEPS[:2])[1], golden) > 10 * LIMIT
