"""The kernel for sm_100: its roles, and its launch.

Persistent CTAs walk a list of tiles (`tile_list`), or pieces of the line of all KV tiles (`split_kv`). Of the four
warpgroups of a CTA two do the softmax of 128 query rows each, one corrects sums and writes results, and the warps of
the last copy and issue matrix products. What a warpgroup computes in turn stands in the module of its role.
Interpreted and assembled, never run on a card.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.core.devices import Card
from inkling_pallas.core.problem import Lengths, Operands
from inkling_pallas.kernels import combine, mosaic
from inkling_pallas.kernels.blackwell import (
    correction_warpgroup,
    load_warps,
    mma_warp,
    scratch,
    softmax_warpgroup,
    work_loop,
)
from inkling_pallas.kernels.blackwell.scratch import Results
from inkling_pallas.kernels.blackwell.tiling import TENSOR_COLUMNS, TensorTiling
from inkling_pallas.kernels.blackwell.work_loop import Walk
from inkling_pallas.kernels.phases.operands import Gmem, in_global_memory
from inkling_pallas.kernels.schedule import seq_table
from inkling_pallas.kernels.schedule.tile_list import Worklist
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS

_MARGIN = 1024  # of shared memory, for barriers and alignment
# Registers of a thread: 4 x 128 threads share 64 K.
_SOFTMAX, _CORRECTION, _COPYING = 168, 96, 80


def fits(tiling: TensorTiling, card: Card) -> bool:
    """True if the buffers fit a CTA's shared and tensor memory, as the table of a list does, and a block a copy."""
    return (
        max(scratch.smem_bytes(tiling), seq_table.smem_bytes(tiling)) <= card.cta_smem - _MARGIN
        and tiling.tensor_columns <= TENSOR_COLUMNS
        and tiling.band_width <= 256
    )


def attend(
    operands: Operands, work: Worklist | Lengths, initial: tuple[jax.Array, ...], tiling: TensorTiling, interpret: Any
) -> tuple[jax.Array, ...]:
    """Launches the kernel over `initial`, the outputs as rows of one head, and returns them.

    Where the work is on a line, what is cut is merged by a second kernel.
    """
    inputs, structure = jax.tree.flatten(in_global_memory(operands, work, tiling))
    refs = [jax.new_ref(x) for x in initial]

    def attend_tiles(*refs: Any, smem: Any, tmem: Any, bars: Any) -> None:
        out, *others = refs[len(inputs) :]
        lse = others.pop(0) if tiling.problem.return_lse else None
        arrays = jax.tree.unflatten(structure, refs[: len(inputs)])
        _program(arrays, Results(out, lse, *others), smem, tmem, bars, tiling)

    parts: Any = mosaic.kernel(
        attend_tiles,
        interpret=interpret,
        auto_barriers=False,
        out_type=combine.part_types(tiling) if tiling.splits and not tiling.whole_units else (),
        grid=(tiling.num_ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 2,
        scratch_types={
            "smem": scratch.smem_types(tiling),
            "tmem": scratch.tmem_types(tiling),
            "bars": scratch.barrier_types(tiling),
        },
    )(*inputs, *refs)
    results = tuple(jax.freeze(ref) for ref in refs)
    if not isinstance(work, Lengths) or not parts:
        return results
    part_out, part_lse = parts
    return combine.merge_pieces(part_out, part_lse, work, results, tiling, interpret)


def _program(arrays: Gmem, results: Results, smem: Any, tmem: Any, bars: Any, tiling: TensorTiling) -> None:
    """The kernel of one CTA."""
    warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
    mosaic.wait_for_previous_kernel(interpret=tiling.interpret)
    if tiling.splits:  # The merge starts on SMs with room.
        mosaic.let_next_kernel_launch(interpret=tiling.interpret)

    @pl.when(warpgroup < WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_SOFTMAX, action="increase")
        walk = work_loop.make(arrays, smem, bars, cta, tiling)
        softmax_warpgroup.weigh_rows(arrays, smem, tmem, bars, warpgroup, walk, tiling)

    @pl.when(warpgroup == WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_CORRECTION, action="decrease")
        walk = work_loop.make(arrays, smem, bars, cta, tiling)
        correction_warpgroup.correct(results, smem, tmem, bars, walk, tiling)

    @pl.when(warpgroup == WARPGROUPS + 1)
    def _() -> None:
        plgpu.set_max_registers(_COPYING, action="decrease")
        walk = work_loop.make(arrays, smem, bars, cta, tiling, fills=True)
        _run_warps(arrays, smem, tmem, bars, walk, tiling)


def _run_warps(arrays: Gmem, smem: Any, tmem: Any, bars: Any, walk: Walk, tiling: TensorTiling) -> None:
    @plgpu.warp_map
    def _(warp: jax.Array) -> None:
        pl.when(warp == 0)(lambda: load_warps.stream_keys(arrays, smem, bars, walk, tiling))
        pl.when(warp == 1)(lambda: load_warps.stream_values(arrays, smem, bars, walk, tiling))
        pl.when(warp == 2)(lambda: load_warps.stream_bias(arrays, smem, bars, walk, tiling))
        pl.when(warp == 3)(lambda: mma_warp.issue_products(smem, tmem, bars, walk, tiling))
