"""Launch of the decode kernel, and of the combine of what is cut: its buffers and its call."""

from typing import Any

import jax

from inkling_pallas.core.problem import Lengths, Operands
from inkling_pallas.kernels import combine, mosaic
from inkling_pallas.kernels.hopper import decode, decode_scratch
from inkling_pallas.kernels.phases.operands import in_global_memory
from inkling_pallas.kernels.schedule.tiling import Tiling


def attend(
    operands: Operands, lengths: Lengths, initial: tuple[jax.Array, ...], tiling: Tiling, interpret: Any
) -> tuple[jax.Array, ...]:
    """Launches the kernel and its combine over `initial`, the outputs as rows of one head."""
    part_out, part_lse, outputs = _attend_pieces(operands, lengths, initial, tiling, interpret)
    if tiling.whole_units:
        return outputs
    return combine.merge_pieces(part_out, part_lse, lengths, outputs, tiling, interpret)


def _attend_pieces(
    operands: Operands, lengths: Lengths, initial: tuple[jax.Array, ...], tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Launches the first kernel; returns its partial results and the outputs."""
    arrays, structure = jax.tree.flatten(in_global_memory(operands, lengths, tiling))
    refs = [jax.new_ref(x) for x in initial]

    def attend_pieces(*refs: Any, smem: Any, bars: Any) -> None:
        inputs = jax.tree.unflatten(structure, refs[: len(arrays)])
        out, *lse, part_out, part_lse = refs[len(arrays) :]
        decode.program(
            inputs, decode_scratch.Results(part_out, part_lse, out, lse[0] if lse else None), smem, bars, tiling
        )

    part_out, part_lse = mosaic.kernel(
        attend_pieces,
        interpret=interpret,
        out_type=combine.part_types(tiling),
        grid=(tiling.num_ctas // tiling.ranks,),
        grid_names=("cta",),
        num_threads=2,
        **mosaic.in_clusters(tiling.ranks),
        scratch_types={"smem": decode_scratch.smem_types(tiling), "bars": decode_scratch.barrier_types(tiling)},
    )(*arrays, *refs)
    return part_out, part_lse, tuple(jax.freeze(ref) for ref in refs)
