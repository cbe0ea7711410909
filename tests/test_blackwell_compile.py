"""The Blackwell kernel lowers for a GPU anywhere and compiles for sm_100a without one: what each variant takes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import absent_card
import pytest
from jax.experimental.mosaic.gpu import utils
from lowered import kernels_in, lower, make_problem

from inkling_pallas.kernels import blackwell

pytestmark = pytest.mark.lowering

PROGRAM = Path(__file__).parent / "compile_for_b200.py"
KERNEL = "attend_tiles_mosaic_gpu_kernel"
DUMPS = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1", "PYTHONUNBUFFERED": "1"}
# Four warpgroups start with 128 registers a thread and share them out anew.
BOUNDS = {"registers": 128, "bytes spilled": 0, "bytes of shared memory": 227 * 1024, "columns of tensor memory": 512}
REPORT = """Resources(smem_scratch_bytes=210944, tmem_scratch_cols=448)
ptxas info    : Compiling entry function 'list_items_mosaic_gpu_kernel' for 'sm_100a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 140 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compiling entry function 'attend_tiles_mosaic_gpu_kernel' for 'sm_100a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 16 barriers, 1 bytes smem
"""


@pytest.mark.parametrize("arch", [(9, 0), (10, 0)])  # jax assumes 9.0 where there is no GPU.
def test_lowers_for_cuda_on_any_machine(arch, monkeypatch):
    monkeypatch.setattr(utils, "_infer_arch", lambda: arch)
    problem = make_problem(24, 2, q_len=64, head_dim=64, dtype="float16", sheared=True)
    assert kernels_in(lower(problem, kernel=blackwell)) == 2  # One lists the tiles.


@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_every_variant_compiles_for_sm_100a_within_bounds(program, record_property):
    environment = os.environ | DUMPS | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(PROGRAM), program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    variants = re.findall(r"^variant (.*)\n((?:(?!variant ).*\n)*)", done.stdout, re.MULTILINE)
    assert len(variants) == 4
    taken = {name: _taken(report) for name, report in variants}
    for name, numbers in taken.items():
        record_property(f"sm_100a: {name}", ", ".join(f"{number} {what}" for what, number in numbers.items()))
    assert {name: _too_much(numbers) for name, numbers in taken.items() if _too_much(numbers)} == {}


@pytest.mark.parametrize(
    ("few", "many", "what"),
    [
        ("Used 128 registers", "Used 136 registers", "registers"),
        (" 0 bytes spill stores", " 8 bytes spill stores", "bytes spilled"),
        ("smem_scratch_bytes=210944", "smem_scratch_bytes=232449", "bytes of shared memory"),
        ("tmem_scratch_cols=448", "tmem_scratch_cols=544", "columns of tensor memory"),
    ],
)
def test_a_report_past_a_bound_is_red(few, many, what):
    assert _too_much(_taken(REPORT)) == []
    assert _too_much(_taken(REPORT.replace(few, many))) == [what]


def test_a_process_that_compiled_for_another_card_is_refused(monkeypatch):
    monkeypatch.setattr(absent_card, "_CARDS", {"of this process": "H200"})
    with pytest.raises(RuntimeError, match="must compile for one card; got B200"):
        absent_card.device("B200")


def _too_much(numbers: dict[str, int]) -> list[str]:
    return [what for what, number in numbers.items() if number > BOUNDS[what]]


def _taken(report: str) -> dict[str, int]:
    """Returns the registers of the attention kernel, and of the rest the most that any kernel of the call takes."""
    assert set(re.findall(r"for '(sm_\w+)'", report)) == {"sm_100a"}
    (attention,) = re.findall(rf"Compiling entry function '{KERNEL}'(?:.*\n)*?.*Used (\d+) registers", report)
    counts = {
        "bytes spilled": r"(\d+) bytes spill stores",
        "bytes of shared memory": r"smem_scratch_bytes=(\d+)",
        "columns of tensor memory": r"tmem_scratch_cols=(\d+)",
    }
    return {"registers": int(attention)} | {
        what: max(map(int, re.findall(pattern, report))) for what, pattern in counts.items()
    }
