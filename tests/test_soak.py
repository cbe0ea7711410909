"""The soak: its dense form is the oracle's, a few hundred batches are green, broken variants red, bad input named."""

import json
import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_pallas.__main__ import main
from inkling_pallas.attention import inkling_rel_attention
from inkling_pallas.testing import dense, limits, soak, soak_command, soak_processes
from inkling_pallas.testing.reference import reference_rel_attention
from inkling_pallas.testing.soak import Report, Soak, run_shape
from inkling_pallas.testing.soak_batches import draw, seed_key
from inkling_pallas.testing.soak_shapes import KINDS, SHAPES, Shape, shape_of

pytestmark = pytest.mark.host

_MIXED = Shape(
    name="tiny_mixed",
    kind="mixed",
    batch_size=4,
    num_tokens=24,
    max_seqlen_q=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    block_size=8,
    max_blocks=12,
    rel_extent=32,
    window_size=(40, 0),
    parts=True,
)
_DECODE = Shape(
    name="tiny_decode",
    kind="decode",
    batch_size=5,
    num_tokens=6,
    max_seqlen_q=1,
    num_heads=4,
    num_kv_heads=1,
    head_dim=64,
    block_size=16,
    max_blocks=8,
    rel_extent=64,
    dtype="float16",
)
_TINY = (_MIXED, _DECODE)
# Each part by itself, so that all variants share the programs.
_SOAK = Soak(seed=3, first=0, random=80, backend="portable", interpret=True)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(soak, "SHAPES", _TINY)


def _is_sound(shape, call):
    """True if a batch has no garbage but in table entries."""
    offsets, kv_lens = call["cu_seqlens_q"].astype(np.int64), call["cache_seqlens"]
    q_lens, extra = np.diff(offsets), [call[name] for name in ("kv_offset", "total_seqlens") if name in call]
    rows = (
        offsets[0] == 0 and offsets[-1] <= shape.num_tokens and ((q_lens >= 0) & (q_lens <= shape.max_seqlen_q)).all()
    )
    return (
        rows
        and all(((x >= 0) & (x <= 2**20)).all() for x in extra)
        and (kv_lens <= shape.capacity).all()
        and (kv_lens >= 0).all()
    )


@pytest.mark.parametrize("shape", _TINY, ids=lambda shape: shape.name)
def test_the_dense_form_is_the_oracle(shape):
    make, attend = (jax.jit(f, static_argnums=0) for f in (draw, dense.attend))
    calls = [jax.device_get(make(shape, seed_key(1), np.int32(index))) for index in range(30)]
    sound = [call for call in calls if _is_sound(shape, call)]
    assert len(sound) >= 8
    for call in sound:
        ours = jax.device_get(attend(shape, call))
        out, lse = reference_rel_attention(**call, **shape.statics())
        assert limits.row_errors(ours.out, out).max() <= 1e-5
        assert limits.lse_errors(ours.lse, lse, "float32").max() <= 1
        rounded = limits.baseline_rel_attention(**call, **shape.statics())
        assert limits.row_errors(rounded, out).max() == pytest.approx(limits.row_errors(ours.rounded, out).max(), 0.5)


def test_its_measures_are_those_of_the_limits():
    expected = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], np.float32)
    actual = np.array([[3.0, 4.5], [0.0, 0.0], [0.0, 1e-30], [np.nan, 0.0], [np.inf, 1.0]], np.float32)
    ours = dense.row_errors(jnp.asarray(actual), jnp.asarray(expected))
    np.testing.assert_allclose(ours, limits.row_errors(actual, expected), rtol=1e-6)
    expected = np.array([1.0, -np.inf, -np.inf, 2.0, 100.0], np.float32)
    actual = np.array([1.0 + 5e-3, -np.inf, 0.0, -np.inf, np.nan], np.float32)
    ours = dense.lse_errors(jnp.asarray(actual), jnp.asarray(expected))
    np.testing.assert_allclose(ours, limits.lse_errors(actual, expected, "bfloat16"), rtol=1e-4)


def test_foreign_memory_is_poison_and_garbage_is_drawn():
    """Counts, over some batches, all that a batch may have beside sound sequences."""
    shape, seen = _MIXED, dict.fromkeys(("lengths", "offsets", "absent", "nobody", "one_page_twice", "inf"), 0)
    make = jax.jit(draw, static_argnums=0)
    for index in range(60):
        call = jax.device_get(make(shape, seed_key(2), np.int32(index)))
        lengths, table = call["cache_seqlens"], call["block_table"]
        live = np.arange(shape.max_blocks) * shape.block_size < lengths[:, None]
        inside = (table >= 0) & (table < shape.num_blocks)
        named = table[live & inside]
        foreign = np.setdiff1d(np.arange(shape.num_blocks), named)
        for name in ("key_cache", "value_cache"):
            assert not np.isfinite(call[name][foreign].astype(np.float32)).any()
        assert np.isnan(call["out"].astype(np.float32)).all()
        seen["lengths"] += ((lengths < 0) | (lengths > shape.capacity)).any()
        seen["offsets"] += (np.diff(call["cu_seqlens_q"].astype(np.int64)) < 0).any()
        seen["absent"] += (live & ~inside).any()
        seen["nobody"] += not np.isfinite(call["q"].astype(np.float32)).all()
        seen["one_page_twice"] += len(np.unique(named)) < len(named)
        seen["inf"] += np.isinf(call["key_cache"].astype(np.float32)).any()
    assert min(seen.values()) >= 4, seen


def test_a_few_hundred_batches_are_green(tiny, tmp_path, capsys):
    argv = ["check", "--random", "300", "--seed", "7", "--backend", "portable", "--out", str(tmp_path)]
    assert main(argv) == 0
    assert "300 random batches of seed 7 from 0 on: 0 wrong" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    assert [facts["done"] for facts in json.loads(path.read_text())["shapes"].values()] == [150, 150]
    before = path.read_bytes()
    assert main([*argv[:4], "8", *argv[5:]]) == 2  # another seed
    assert "--out must hold a run of seed 8; got 7 in" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert main(argv) == 0  # nothing is left to do
    assert "300 random batches" in capsys.readouterr().out


def _shifted_bias(operator, call):
    return operator(**call | {"rel_logits": jnp.roll(call["rel_logits"], 1, axis=-1)})


def _one_key_more(operator, call):
    return operator(**call | {"cache_seqlens": call["cache_seqlens"] + 1})


def _page_ids_clipped(operator, call):
    return operator(**call | {"block_table": jnp.clip(call["block_table"], 0, len(call["key_cache"]) - 1)})


def _next_page(operator, call):
    return operator(**call | {"block_table": jnp.roll(call["block_table"], 1, axis=1)})


def _row_of_nobody_left(operator, call):
    out, lse = operator(**call)
    return jnp.where((lse == -jnp.inf)[..., None], call["out"], out), lse


def _lse_of_nobody_left(operator, call):
    out, lse = operator(**call)
    return out, jnp.where(lse == -jnp.inf, 0.0, lse)


_BROKEN = (_shifted_bias, _one_key_more, _page_ids_clipped, _next_page, _row_of_nobody_left, _lse_of_nobody_left)


@pytest.mark.parametrize("shape", _TINY, ids=lambda shape: shape.name)
def test_broken_variants_are_red(tiny, shape):
    def wrong(broken):
        def operator(**call):
            return broken(inkling_rel_attention, call)

        return sum(len(report.wrong) for report in run_shape(_SOAK, shape, operator=operator))

    assert wrong(lambda operator, call: operator(**call)) == 0
    found = {broken.__name__: wrong(broken) for broken in _BROKEN}
    assert min(found.values()) >= 2, found


def test_a_wrong_batch_is_told_with_what_repeats_it(tiny, monkeypatch, capsys):
    def make_program(shape, soak, operator):
        # (rows, error, limit, worst row, LSE error, its row) of a batch
        return lambda key, index: np.array([3, np.inf, 4e-3, 9, 0.5, 2] if index == 22 else [0] * 2 + [1] + [0] * 3)

    monkeypatch.setattr(soak, "make_program", make_program)
    argv = ["check", "--random", "40", "--seed", "3", "--bias", "sheared", "--layout", "packed", "--quiet"]
    assert main([*argv, "--backend", "portable"]) == 1
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("RED: "))
    assert line.startswith("RED: tiny_mixed, seed 3, batch 22: 3 rows of one head are wrong; error inf of out at")
    assert "(2, 1), limit 0.004; LSE 0.5 times its limit at (0, 2)" in line
    again = line.partition("Again: python -m inkling_pallas ")[2].split()
    assert main(again) == 1
    assert line in capsys.readouterr().out
    assert {"--bias", "--layout"} < set(again)


def test_a_shape_that_dies_or_is_refused_is_told(tiny, monkeypatch, capsys):
    def refuses(**call):
        raise NotImplementedError("head_dim must be 128.") if len(call["q"]) == 24 else RuntimeError("no\nmemory")

    monkeypatch.setattr(soak, "OPERATORS", {"plain": refuses})
    assert main(["check", "--random", "2", "--backend", "portable"]) == 1
    printed = capsys.readouterr().out
    assert "1 shapes failed, 1 refused" in printed
    assert "RuntimeError: no" in printed
    assert "no batch was judged" in printed


def test_processes_send_reports_and_one_that_dies_is_a_failure():
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    good, bad = (receiver for receiver, _ in pipes)
    pipes[0][1].send(Report(shape="a", done=16))
    pipes[0][1].send(None)
    pipes[1][1].send(Report(shape="c", done=3))
    pipes[1][1].close()

    class Dead:
        exitcode = -11

        def join(self):
            pass

    received = list(soak_processes._receive({good: (Dead(), [(_MIXED, 0)]), bad: (Dead(), [(_DECODE, 0)])}))
    assert sorted((report.shape, report.done) for report in received if report.done) == [("a", 16), ("c", 3)]
    assert [(r.shape, r.failed) for r in received if r.failed] == [("c", "its process ended with exit status -11")]


def test_a_batch_has_one_shape_and_every_kind_has_some():
    assert {shape.kind for shape in SHAPES} == set(KINDS)
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    run = Soak(seed=0, first=31, random=100, backend="portable")
    found = sorted((index, shape.name) for shape in run.shapes() for index in run.indices(shape))
    assert found == [(index, shape_of(index).name) for index in range(31, 131)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--random", "0"], "--random must be an integer from 1 to 2147483647; got '0'."),
        (["--random", "1.5"], "--random must be an integer from 1"),
        (["--seed", "1"], "--random must be an integer from 1 to 2147483647; got None."),
        (["--random", "5", "--seed", "-1"], "--seed must be an integer from 0 to 2147483647; got '-1'."),
        (["--random", "5", "--first", "-1"], "--first must be an integer from 0 to 2147483647; got '-1'."),
        (["--random", "5", "--first", "2147483645"], "--first must be at most 2**31 - 5"),
        (["--random", "5", "--processes", "0"], "--processes must be an integer from 1 to 1024; got '0'."),
        (["--random", "5", "--kind", "decoding"], "--kind must be one of decode, multi-token"),
        (["--random", "1", "--kind", "mixed"], "--random must reach a batch of kind 'mixed' from 0 on; got 1."),
        (["--random", "5", "--full"], "--full must be left out with --random"),
        (["--random", "5", "--backend", "cuda"], "--backend must be one of portable, hopper, blackwell; got 'cuda'."),
    ],
)
def test_bad_options_take_one_line(argv, message, capsys):
    assert main(["check", *argv]) == 2
    printed = capsys.readouterr().out
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": {"version": "0"}}, "--out must hold a run of version"),
        ({"run": {"backend": "hopper"}}, "--out must hold a run of backend 'portable'; got 'hopper' in"),
        ({"run": {"first": 5}}, "--out must hold a run of first 0; got 5 in"),
        ({"random": 99}, "--random must be at least 99"),
        ({"shapes": None}, "--out must hold a file of `check --random`"),
        ("no json", "--out must hold a file of `check --random`"),
    ],
)
def test_another_file_is_refused_and_stays(tiny, monkeypatch, tmp_path, capsys, change, message):
    monkeypatch.setattr(soak_command, "reports", lambda *_: iter([Report(shape="tiny_mixed", done=2)]))
    argv = ["check", "--random", "4", "--backend", "portable", "--out", str(tmp_path)]
    assert main(argv) == 0
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    if isinstance(change, dict):
        for name, value in change.items():
            written[name] = {**written[name], **value} if isinstance(value, dict) else value
        path.write_text(json.dumps(written))
    else:
        path.write_text(change)
    before = path.read_bytes()
    capsys.readouterr()
    assert main(argv) == 2
    printed = capsys.readouterr().out
    assert message in printed
    assert printed.count("\n") == 1
    assert path.read_bytes() == before


def test_it_goes_on_where_it_was_interrupted(tiny, monkeypatch, tmp_path, capsys):
    asked = []

    def interrupted(soak, done, processes):
        asked.append(done)
        yield Report(shape="tiny_mixed", done=2, worst=float("inf"), wrong=({"batch": 2},))
        raise KeyboardInterrupt

    monkeypatch.setattr(soak_command, "reports", interrupted)
    monkeypatch.setattr(soak_command, "_sentence", lambda soak, batch: f"RED: {batch}")
    argv = ["check", "--random", "40", "--backend", "portable", "--out", str(tmp_path)]
    assert main(argv) == 130
    assert "the same command goes on from" in capsys.readouterr().out
    assert main(argv) == 130
    assert asked == [{"tiny_mixed": 0, "tiny_decode": 0}, {"tiny_mixed": 2, "tiny_decode": 0}]
