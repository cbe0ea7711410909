"""The kernel for sm_100, many query rows per sequence: its roles, and its launch.

Persistent CTAs walk a list of tiles (`worklist`). Of the four warpgroups of a CTA two do the softmax of 128 query rows
each, one corrects sums and writes results, and the warps of the last copy and issue matrix products.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels import (
    band,
    mosaic,
    pages,
    tensor_buffers,
    tensor_copies,
    tensor_correction,
    tensor_products,
    tensor_softmax,
)
from inkling_pallas.kernels.prefill_buffers import Gmem
from inkling_pallas.kernels.tensor_tiling import TENSOR_COLUMNS, TensorTiling
from inkling_pallas.kernels.tiling import WARPGROUPS
from inkling_pallas.kernels.worklist import Worklist
from inkling_pallas.problem import Operands

_SMEM_BYTES = 226 * 1024  # less than a CTA may have, for barriers and alignment
# Registers of a thread: 4 x 128 threads share 64 K.
_SOFTMAX, _CORRECTION, _COPYING = 184, 80, 64


def fits(tiling: TensorTiling) -> bool:
    """True if the buffers fit a CTA's shared and tensor memory and a bias block fits a copy."""
    return (
        tensor_buffers.smem_bytes(tiling) <= _SMEM_BYTES
        and tiling.tensor_columns <= TENSOR_COLUMNS
        and tiling.band_width <= 256
    )


def attend(
    operands: Operands, work: Worklist, initial: tuple[jax.Array, ...], tiling: TensorTiling, interpret: Any
) -> tuple[jax.Array, ...]:
    """Launches the kernel over `initial`, the outputs as rows of one head, and returns them."""
    gmem = Gmem(
        q=operands.q,
        key=pages.split_pages(operands.cache_arrays[0], tiling),
        value=pages.split_pages(operands.cache_arrays[-1], tiling),
        block_table=operands.block_table,
        rel_logits=band.pad_for_interpreter(operands.rel_logits, tiling),
        work=work,
    )
    inputs, structure = jax.tree.flatten(gmem)
    refs = [jax.new_ref(x) for x in initial]

    def attend_tiles(*refs: Any, smem: Any, tmem: Any, bars: Any) -> None:
        out, *lse = refs[len(inputs) :]
        gmem = jax.tree.unflatten(structure, refs[: len(inputs)])
        _program(gmem, (out, lse[0] if lse else None), smem, tmem, bars, tiling)

    mosaic.kernel(
        attend_tiles,
        interpret=interpret,
        auto_barriers=False,
        out_type=(),
        grid=(tiling.num_ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 2,
        scratch_types={
            "smem": tensor_buffers.smem_types(tiling),
            "tmem": tensor_buffers.tmem_types(tiling),
            "bars": tensor_buffers.barrier_types(tiling),
        },
    )(*inputs, *refs)
    return tuple(jax.freeze(ref) for ref in refs)


def _program(gmem: Gmem, outputs: Any, smem: Any, tmem: Any, bars: Any, tiling: TensorTiling) -> None:
    """The kernel of one CTA."""
    warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
    mosaic.wait_for_previous_kernel(interpret=tiling.interpret)

    @pl.when(warpgroup < WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_SOFTMAX, action="increase")
        tensor_softmax.weigh_rows(gmem, smem, tmem, bars, warpgroup, cta, tiling)

    @pl.when(warpgroup == WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(_CORRECTION, action="decrease")
        tensor_correction.correct(gmem, outputs, smem, tmem, bars, cta, tiling)

    @pl.when(warpgroup == WARPGROUPS + 1)
    def _() -> None:
        plgpu.set_max_registers(_COPYING, action="decrease")
        _run_warps(gmem, smem, tmem, bars, cta, tiling)


def _run_warps(gmem: Gmem, smem: Any, tmem: Any, bars: Any, cta: jax.Array, tiling: TensorTiling) -> None:
    @plgpu.warp_map
    def _(warp: jax.Array) -> None:
        pl.when(warp == 0)(lambda: tensor_copies.stream_keys(gmem, smem, bars, cta, tiling))
        pl.when(warp == 1)(lambda: tensor_copies.stream_values(gmem, smem, bars, cta, tiling))
        pl.when(warp == 2)(lambda: tensor_copies.stream_bias(gmem, smem, bars, cta, tiling))
        pl.when(warp == 3)(lambda: tensor_products.issue_products(gmem, smem, tmem, bars, cta, tiling))
