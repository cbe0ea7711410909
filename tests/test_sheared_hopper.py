"""The Hopper kernels on a sheared table, interpreted with race detection: the bits of a plain one, and the oracle."""

from typing import Any

import interpreted
import numpy as np
import pytest
from interpreted import LIMITS
from test_sheared import shear_call

from inkling_pallas.kernels import hopper
from inkling_pallas.kernels.phases import bias
from inkling_pallas.testing import row_errors
from inkling_pallas.testing.cases import Case, build
from inkling_pallas.testing.reference import reference_rel_attention

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]

_DECODE = hopper.Config(block_kv=64, num_stages=2, num_ctas=2)
_PREFILL = hopper.Config(block_kv=64, num_stages=2, num_ctas=1, program="prefill")


def small(name, q_lens, kv_lens, **facts):
    shape: dict[str, Any] = {"num_kv_heads": 1, **facts}
    return Case(name=name, kind="sheared", q_lens=q_lens, kv_lens=kv_lens, **shape)


CASES = {
    "odd extent, group 3": (_DECODE, small("odd", (1, 2), (130, 70), num_heads=3, rel_extent=20)),
    "prefill": (_PREFILL, small("prefill", (19,), (90,), num_heads=6, num_kv_heads=2, rel_extent=40)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sheared_table_is_right_without_a_race(name, capfd):
    config, case = CASES[name]
    call = build(case)
    interpreted.assert_right(interpreted.attend(shear_call(call), config), call, capfd, LIMITS["bfloat16"])


def test_tokens_across_a_step_of_a_part_are_right(capfd):
    facts: dict[str, Any] = {"rel_extent": 64, "window_size": (60, 0), "padding_rows": 1, "poison": ("padding_rows",)}
    call = build(small("part", (5,), (70,), **facts))
    call |= {"kv_offset": np.array([13], np.int32), "total_seqlens": np.array([88], np.int32)}
    interpreted.assert_right(interpreted.attend(shear_call(call), _DECODE), call, capfd, LIMITS["bfloat16"])


def test_a_start_that_is_one_step_off_is_red(monkeypatch):
    call = build(small("broken", (1,), (40,), rel_extent=64))
    right = bias._start
    monkeypatch.setattr(bias, "_start", lambda piece, tile, tiling: right(piece, tile, tiling) + 8)
    out, _ = interpreted.attend(shear_call(call), _DECODE)
    assert row_errors(out, reference_rel_attention(**call)).max() > LIMITS["bfloat16"]
