"""The commands as a user meets them: output, exit status, words for bad options and files."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from inkling_pallas.__main__ import main
from inkling_pallas.kernels import blackwell, hopper
from inkling_pallas.serving import demo
from inkling_pallas.serving.trace import TraceError, read_trace
from inkling_pallas.testing import command, judge

_QUICK = ["--requests", "3", "--chunk", "16", "--decode-steps", "1", "--global-extent", "32", "--local-extent", "32"]


def test_the_demo_is_green(capsys):
    assert main(["demo", *_QUICK]) == 0
    printed = capsys.readouterr().out
    assert "global: mixed batch" in printed
    assert "local: decode step 1" in printed
    assert "Green" in printed


@pytest.mark.slow
@pytest.mark.host
def test_the_demo_draws_and_takes_a_layout(tmp_path, capsys):
    picture = tmp_path / "overview.png"
    assert main(["demo", *_QUICK, "--plot", str(picture), "--layout", "interleaved"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"wrote {picture}" in capsys.readouterr().out
    assert main(["demo", *_QUICK, "--plot", str(tmp_path / "missing" / "overview.png")]) == 2
    assert "No such file or directory" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.host
def test_a_red_demo_says_so(capsys, monkeypatch):
    monkeypatch.setattr(demo, "error_limit", lambda *_: 1e-9)
    assert main(["demo", *_QUICK]) == 1
    assert "RED: global: mixed batch" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.host
def test_the_demo_takes_a_trace(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,40,3\ny,7,1\n")
    assert main(["demo", "--trace", str(path), *_QUICK]) == 0
    assert " 47 " in capsys.readouterr().out


@pytest.mark.host
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("", "no column 'ContextTokens' in its first line"),
        ("ContextTokens\n4\n", "no column 'GeneratedTokens'"),
        ("ContextTokens,GeneratedTokens\n", "no requests after its first line"),
        ("ContextTokens,GeneratedTokens\n5,2\n1.5,2\n", "line 3: ContextTokens must be an integer from 1"),
        ("ContextTokens,GeneratedTokens\n5\n", "line 2: GeneratedTokens must be an integer from 0"),
        ("ContextTokens,GeneratedTokens\n0,2\n", "line 2: ContextTokens must be an integer from 1"),
    ],
)
def test_a_bad_trace_is_explained(tmp_path, capsys, text, message):
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    assert main(["demo", "--trace", str(path), *_QUICK]) == 2
    printed = capsys.readouterr()
    assert message in printed.out + printed.err
    assert "Traceback" not in printed.out + printed.err


@pytest.mark.host
def test_a_binary_trace_is_explained(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(TraceError, match="not a CSV text file"):
        read_trace(path)


@pytest.mark.host
def test_the_shipped_trace():
    assert len(read_trace()) >= 24


@pytest.mark.host
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["demo", "--chunk", "0"], "--chunk: must be an integer >= 1; got '0'"),
        (["demo", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_bad_options_end_with_2(argv, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.host
def test_a_shape_that_does_not_fit_is_explained(capsys):
    assert main(["demo", *_QUICK, "--global-heads", "7", "--global-kv-heads", "2"]) == 2
    assert "num_heads must be a multiple of num_kv_heads = 2; got 7" in capsys.readouterr().out


def test_check_shows_margins(capsys):
    assert main(["check", "--kind", "decode"]) == 0
    printed = capsys.readouterr().out
    assert "small_decode" in printed
    assert "margin" in printed
    assert "1 ok, 0 red" in printed


@pytest.mark.host
def test_check_is_red_when_a_backend_is(capsys, monkeypatch):
    monkeypatch.setattr(command, "judge", _broken)
    assert main(["check", "--kind", "decode", "--backend", "portable"]) == 1
    assert "1 red" in capsys.readouterr().out


def _broken(case, operator, backend):
    import numpy as np

    from inkling_pallas.testing import judge

    return judge.judge(
        case, lambda **c: operator(**{**c, "rel_logits": np.zeros_like(c["rel_logits"])}), backend=backend
    )


@pytest.mark.host
def test_check_writes_its_verdicts(tmp_path):
    assert main(["check", "--kind", "spike probe", "--bias", "sheared", "--out", str(tmp_path / "new")]) == 0
    (path,) = (tmp_path / "new").iterdir()
    written = json.loads(path.read_text())
    assert path.name.endswith("-check-portable-sheared-partial.json")
    assert written["meta"]["command"].startswith("python -m inkling_pallas check --kind 'spike probe'")
    assert [case["verdict"] for case in written["cases"]] == ["ok"]


@pytest.mark.host
def test_check_explains_bad_options(capsys):
    assert main(["check", "--kind", "decoding"]) == 2
    assert "--kind must be one of full prefill" in capsys.readouterr().out
    assert main(["check", "--backend", "cuda"]) == 2
    assert "--backend must be one of portable, hopper, blackwell; got 'cuda'." in capsys.readouterr().out


@pytest.mark.host
def test_an_interpreted_kernel_has_few_ctas_and_keeps_few_clusters(monkeypatch):
    def config_of(config):
        seen = []
        monkeypatch.setattr(judge, "explain", lambda **call: SimpleNamespace(config=config))
        judge.interpreted(lambda **call: seen.append(call["config"]))()
        return seen[0]

    clusters = hopper.Config(block_kv=64, num_stages=2, num_ctas=16, cluster_size=8)
    many = dataclasses.replace(clusters, num_ctas=128)
    alone = dataclasses.replace(clusters, num_ctas=2, cluster_size=1)
    rows = dataclasses.replace(clusters, program="prefill", num_ctas=132, cluster_size=2, few_rows=many)
    assert config_of(clusters) == clusters
    assert config_of(many) == alone
    assert config_of(rows) == dataclasses.replace(rows, num_ctas=2, few_rows=alone)
    assert config_of(blackwell.Config(num_ctas=148)) == blackwell.Config(num_ctas=2)


@pytest.mark.host
def test_check_interprets_a_kernel_whose_card_is_not_there(monkeypatch, capsys):
    judged = []

    def judge(case, operator, **how):
        judged.append((case.name, operator, how))
        raise NotImplementedError("not now")

    monkeypatch.setenv("NPROC", "16")
    monkeypatch.setattr(command, "judge", judge)
    assert main(["check", "--backend", "blackwell", "--kind", "decode"]) == 0
    assert "no card for blackwell here; the Pallas interpreter runs its small cases" in capsys.readouterr().out
    assert [(name, how) for name, _, how in judged] == [("small_decode", {"backend": "blackwell"})]
    assert all(operator is not command.OPERATORS["plain"] for _, operator, _ in judged)


def test_the_module_is_a_command():
    run = [sys.executable, "-m", "inkling_pallas"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    helped = subprocess.run([*run, "--help"], capture_output=True, text=True, env=environment, check=False)
    assert helped.returncode == 0
    assert "demo" in helped.stdout
    wrong = subprocess.run([*run, "dmeo"], capture_output=True, text=True, env=environment, check=False)
    assert wrong.returncode == 2
    assert "there is no command 'dmeo'" in wrong.stderr
