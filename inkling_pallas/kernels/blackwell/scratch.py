"""Memory and barriers of the kernel for sm_100, and its protocol.

Warpgroups w = 0 and 1 do the softmax of 128 rows each, warpgroup 2 corrects their sums and writes results, and the
warps of warpgroup 3 copy K, V and the bias and issue the products. `tc`: a tensor core's work arrives.

| barrier | arrives | waits | guards |
|---|---|---|---|
| k_ready [stage] | copies of K | products | smem.k[stage] |
| k_free [stage] | tc: scores | K warp | smem.k[stage], in time also .absent |
| v_ready [stage] | copies of V | products, correction | smem.v[stage] |
| v_clear [stage] | correction, only in tiles that it clears | products | smem.v[stage] |
| v_free [stage] | tc: sums | V warp | smem.v[stage] |
| band_ready, band_free [slot, w] | copy of the table; warpgroup w | warpgroup w; bias warp | smem.band[slot, w] |
| q_ready [w] | warpgroup w | products | smem.q[w], free again when the last scores are ready |
| s_ready [w] | tc: scores | warpgroup w | tmem.scores[w] |
| p_ready [w] | warpgroup w | products | tmem.weights[w], and tmem.scores[w] is free |
| note_ready, note_free [w] | warpgroup w; correction | correction; warpgroup w | smem.notes[w] |
| o_done [w] | tc: sums | correction | tmem.sums[w] |
| table_ready | copying warpgroup, where the work is on a line | the others | smem.table |
| o_ready [w] | correction | products | tmem.sums[w], rescaled or read for the last time |

A tensor core's arrival says that all products issued before are complete, and the scores of tile t + 1 are issued
after the sums of tile t. So s_ready of tile t + 1 says, too, that the weights of tile t were read.
As many more notes than stages as tiles are at work: smem.absent of tile t is written again once the scores of tile
t + stride are there, whose products are issued after warpgroup w has weighed tile t.
Of band_free and note_free whoever frees gives one arrival for each slot at the start: all are free then.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.blackwell.tiling import TensorTiling
from inkling_pallas.kernels.mosaic.tmem_rows import LANES
from inkling_pallas.kernels.phases import pages
from inkling_pallas.kernels.schedule import seq_table
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS


class Results(NamedTuple):
    """Outputs in global memory, as rows of one head; partial ones only where the work is on a line."""

    out: Any
    lse: Any
    part_out: Any = None
    part_lse: Any = None


class Smem(NamedTuple):
    """Buffers of a CTA."""

    table: Any
    k: Any
    v: Any
    q: Any
    band: Any
    absent: Any  # which chunks of a KV tile have no page
    notes: Any  # float32[warpgroup, 2, 128]: the decay of a tile; at the end the weight and the reference


class Tmem(NamedTuple):
    """Tensor memory of a CTA, [warpgroup, 128, columns]."""

    scores: Any
    weights: Any
    sums: Any


class Barriers(NamedTuple):
    """See the module's table."""

    table_ready: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_clear: Any
    v_free: Any
    band_ready: Any
    band_free: Any
    q_ready: Any
    s_ready: Any
    p_ready: Any
    note_ready: Any
    note_free: Any
    o_done: Any
    o_ready: Any


def smem_types(tiling: TensorTiling) -> Smem:
    """Returns the buffers of a CTA as scratch types."""
    problem, dtype = tiling.problem, jnp.dtype(tiling.problem.dtype)
    cache = mosaic.swizzled((tiling.num_stages, tiling.block_kv, problem.head_dim), dtype)
    block = (tiling.band_slots, WARPGROUPS, tiling.token_block, problem.group, tiling.band_width)
    return Smem(
        table=seq_table.smem_type(tiling) if tiling.splits else None,
        k=cache,
        v=cache,
        q=mosaic.swizzled((WARPGROUPS, LANES, problem.head_dim), dtype),
        band=plgpu.SMEM(block, dtype),
        absent=pages.notes_type(tiling, tiling.note_slots),
        notes=plgpu.SMEM((WARPGROUPS, 2, LANES), jnp.float32),
    )


def tmem_types(tiling: TensorTiling) -> Tmem:
    """Returns the tensor memory of a CTA as scratch types."""
    shape, dtype = (WARPGROUPS, LANES), jnp.dtype(tiling.problem.dtype)
    return Tmem(
        scores=plgpu.TMEM((*shape, tiling.block_kv), jnp.float32),
        weights=plgpu.TMEM((*shape, tiling.block_kv), dtype, packed=True),
        sums=plgpu.TMEM((*shape, tiling.problem.head_dim), jnp.float32),
    )


def barrier_types(tiling: TensorTiling) -> Barriers:
    """Returns the barriers of a CTA as scratch types."""
    stages, copies = tiling.num_stages, tiling.block_kv // tiling.chunk
    slots = tiling.band_slots * WARPGROUPS
    return Barriers(
        table_ready=plgpu.Barrier(num_arrivals=1),
        k_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        k_free=_of_tensor_core(stages),
        v_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_clear=plgpu.Barrier(num_barriers=stages),
        v_free=_of_tensor_core(stages),
        band_ready=plgpu.Barrier(num_barriers=slots),
        band_free=plgpu.Barrier(num_barriers=slots),
        q_ready=plgpu.Barrier(num_barriers=WARPGROUPS),
        s_ready=_of_tensor_core(WARPGROUPS),
        p_ready=_of_tensor_core(WARPGROUPS),
        note_ready=plgpu.Barrier(num_barriers=WARPGROUPS),
        note_free=plgpu.Barrier(num_barriers=WARPGROUPS),
        o_done=_of_tensor_core(WARPGROUPS),
        o_ready=_of_tensor_core(WARPGROUPS),
    )


def _of_tensor_core(count: int) -> Any:
    return plgpu.Barrier(num_barriers=count, orders_tensor_core=True)


def smem_bytes(tiling: TensorTiling) -> int:
    """Returns what the buffers take."""
    head_dim = tiling.problem.head_dim
    cache = 2 * tiling.num_stages * tiling.block_kv * head_dim
    band = tiling.band_slots * WARPGROUPS * tiling.rows * tiling.band_width
    words = 4 * (WARPGROUPS * 2 * LANES + tiling.note_slots) + (seq_table.smem_bytes(tiling) if tiling.splits else 0)
    return 2 * (cache + WARPGROUPS * LANES * head_dim + band) + words
