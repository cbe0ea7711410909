"""The Blackwell kernel compiles for sm_100a without a card: registers, spills, shared and tensor memory."""

import re
from typing import Any

import absent_card
import jax
import pytest
from test_hopper_compile import lower, make_problem

from inkling_pallas.kernels import blackwell

pytestmark = pytest.mark.lowering

COMPILED = {
    "prefill, global": make_problem(64, 8, batch=1, q_len=8192, sheared=True),
    "prefill, local, lse": make_problem(64, 16, q_len=64, local=True, sheared=True, return_lse=True),
    "decode, 4 tokens, packed": make_problem(64, 16, q_len=4, sheared=True, layout="packed"),
    "decode, plain table": make_problem(8, 1, batch=1, num_splits=1, return_lse=True),
}
# Four warpgroups start with 128 registers a thread and share them out anew.
BOUNDS = {"registers": 128, "spilled": 0, "shared memory": 227 * 1024, "tensor memory": 512}


def test_lowers_for_cuda_on_any_machine():
    problem = make_problem(24, 2, q_len=64, head_dim=64, dtype="float16", sheared=True)
    assert lower(problem, kernel=blackwell).as_text().count("custom_call @mosaic_gpu") == 2  # One lists the tiles.


@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_sm_100a_within_bounds(name, monkeypatch, tmp_path):
    for what in ("PTXAS", "RESOURCES"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{what}", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    card = absent_card.device("B200")
    with jax.default_device(card):
        lower(COMPILED[name], card, blackwell).compile()
    report, resources = _reports(tmp_path, "ptxas"), _reports(tmp_path, "resources.txt")
    used = {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", report))),
        "spilled": max(map(int, re.findall(r"(\d+) bytes spill stores", report))),
        "shared memory": int(re.findall(r"smem_scratch_bytes=(\d+)", resources)[0]),
        "tensor memory": int(re.findall(r"tmem_scratch_cols=(\d+)", resources)[0]),
    }
    print(name, used)
    assert {what: n for what, n in used.items() if n > BOUNDS[what]} == {}


def _reports(folder: Any, kind: str) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob(f"attend_tiles*.{kind}")))
