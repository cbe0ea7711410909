"""Assembly and launch of the prefill kernel: its buffers and its call."""

from typing import Any

import jax

from inkling_pallas.core.devices import Card
from inkling_pallas.core.problem import Operands
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.hopper import prefill, prefill_scratch
from inkling_pallas.kernels.phases.operands import in_global_memory
from inkling_pallas.kernels.schedule import seq_table
from inkling_pallas.kernels.schedule.tile_list import Worklist
from inkling_pallas.kernels.schedule.tiling import RowTiling

_MARGIN = 1024  # of shared memory, for barriers and alignment


def fits(tiling: RowTiling, card: Card) -> bool:
    """True if shared memory holds the buffers, and the table of the kernel that lists, and a bias block fits a copy."""
    return (
        max(prefill_scratch.smem_bytes(tiling), seq_table.smem_bytes(tiling)) <= card.cta_smem - _MARGIN
        and tiling.band_width <= 256
    )


def attend(
    operands: Operands, work: Worklist, initial: tuple[jax.Array, ...], tiling: RowTiling, interpret: Any
) -> tuple[jax.Array, ...]:
    """Launches the kernel over `initial`, the outputs as rows of one head, and returns them."""
    inputs, structure = jax.tree.flatten(in_global_memory(operands, work, tiling))
    refs = [jax.new_ref(x) for x in initial]

    def attend_tiles(*refs: Any, smem: Any, bars: Any) -> None:
        out, *lse = refs[len(inputs) :]
        prefill.program(
            jax.tree.unflatten(structure, refs[: len(inputs)]), out, lse[0] if lse else None, smem, bars, tiling
        )

    mosaic.kernel(
        attend_tiles,
        interpret=interpret,
        auto_barriers=False,
        out_type=(),
        grid=(tiling.num_clusters,),
        grid_names=("cluster",),
        num_threads=3,
        scratch_types={"smem": prefill_scratch.smem_types(tiling), "bars": prefill_scratch.barrier_types(tiling)},
        **mosaic.in_clusters(tiling.cluster_size),
    )(*inputs, *refs)
    return tuple(jax.freeze(ref) for ref in refs)
