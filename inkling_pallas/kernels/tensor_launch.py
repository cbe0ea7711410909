"""The kernel for sm_100: its roles, and its launch.

Persistent CTAs walk a list of tiles (`worklist`), or pieces of the line of all KV tiles (`schedule`). Of the four
warpgroups of a CTA two do the softmax of 128 query rows each, one corrects sums and writes results, and the warps of
the last copy and issue matrix products. What a warpgroup computes in turn stands in the module of its role.
Interpreted and assembled, never run on a card.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels import (
    combine,
    gmem,
    mosaic,
    table,
    tensor_buffers,
    tensor_copies,
    tensor_correction,
    tensor_products,
    tensor_softmax,
    tensor_walk,
)
from inkling_pallas.kernels.gmem import Gmem
from inkling_pallas.kernels.tensor_buffers import Results
from inkling_pallas.kernels.tensor_tiling import TENSOR_COLUMNS, TensorTiling
from inkling_pallas.kernels.tensor_walk import Walk
from inkling_pallas.kernels.tiling import WARPGROUPS
from inkling_pallas.kernels.worklist import Worklist
from inkling_pallas.problem import Lengths, Operands

_SMEM_BYTES = 226 * 1024  # less than a CTA may have, for barriers and alignment
# Registers of a thread: 4 x 128 threads share 64 K.
_SOFTMAX, _CORRECTION, _COPYING = 168, 96, 80


def fits(tiling: TensorTiling) -> bool:
    """True if the buffers fit a CTA's shared and tensor memory, as the table of a list does, and a block a copy."""
    return (
        max(tensor_buffers.smem_bytes(tiling), table.smem_bytes(tiling)) <= _SMEM_BYTES
        and tiling.tensor_columns <= TENSOR_COLUMNS
        and tiling.band_width <= 256
    )


def attend(
    operands: Operands, work: Worklist | Lengths, initial: tuple[jax.Array, ...], tiling: TensorTiling, interpret: Any
) -> tuple[jax.Array, ...]:
    """Launches the kernel over `initial`, the outputs as rows of one head, and returns them.

    Where the work is on a line, what is cut is merged by a second kernel.
    """
    inputs, structure = jax.tree.flatten(gmem.of_operands(operands, work, tiling))
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
            "smem": tensor_buffers.smem_types(tiling),
            "tmem": tensor_buffers.tmem_types(tiling),
            "bars": tensor_buffers.barrier_types(tiling),
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
        walk = tensor_walk.make(arrays, smem, bars, cta, tiling)
        tensor_softmax.weigh_rows(arrays, smem, tmem, bars, warpgroup, walk, tiling)

    @pl.when(warpgroup == WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_CORRECTION, action="decrease")
        walk = tensor_walk.make(arrays, smem, bars, cta, tiling)
        tensor_correction.correct(results, smem, tmem, bars, walk, tiling)

    @pl.when(warpgroup == WARPGROUPS + 1)
    def _() -> None:
        plgpu.set_max_registers(_COPYING, action="decrease")
        walk = tensor_walk.make(arrays, smem, bars, cta, tiling, fills=True)
        _run_warps(arrays, smem, tmem, bars, walk, tiling)


def _run_warps(arrays: Gmem, smem: Any, tmem: Any, bars: Any, walk: Walk, tiling: TensorTiling) -> None:
    @plgpu.warp_map
    def _(warp: jax.Array) -> None:
        pl.when(warp == 0)(lambda: tensor_copies.stream_keys(arrays, smem, bars, walk, tiling))
        pl.when(warp == 1)(lambda: tensor_copies.stream_values(arrays, smem, bars, walk, tiling))
        pl.when(warp == 2)(lambda: tensor_copies.stream_bias(arrays, smem, bars, walk, tiling))
        pl.when(warp == 3)(lambda: tensor_products.issue_products(smem, tmem, bars, walk, tiling))
