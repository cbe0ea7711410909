"""Memory and barriers of the decode kernel, and its protocol.

| barrier | arrives | waits | guards |
|---|---|---|---|
| table_ready | the copying warp, once, after its first tile | warpgroup 0 | smem.table |
| q_ready, q_free | copy of q; warpgroup 0 | warpgroup 0; the copying warp | smem.q_rows, one piece ahead |
| k_ready, k_free [stage] | copies of K; warpgroup 0 | warpgroup 0; the copying warp | smem.k, .band, note [stage] |
| band_ready [stage] | copy of rel_logits, biased tiles only | warpgroup 0 | smem.band[stage] |
| v_ready, v_free [stage] | copies of V; warpgroup 0 | warpgroup 0; the copying warp | smem.v[stage] |
| smem.parts_barrier | warpgroup 0, expecting bytes; the cluster's stores | warpgroup 0, once | smem.parts, .part_lses |
| parts_ready, in its place in the interpreter | warpgroup 0 of each CTA | warpgroup 0 | results.part_out, .part_lse |
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.schedule import seq_table
from inkling_pallas.kernels.schedule.tiling import Tiling


class Results(NamedTuple):
    """Outputs in global memory, as rows of one head."""

    part_out: Any
    part_lse: Any
    out: Any
    lse: Any


class Smem(NamedTuple):
    """Buffers of a CTA."""

    table: Any  # and after it for each stage a note of which chunks have no page
    q_rows: Any  # as copied
    q: Any  # as a matrix operand
    weights: Any
    k: Any
    v: Any
    band: Any
    parts: Any  # in a cluster: this CTA's elements of the rows of each, None elsewhere
    part_lses: Any  # the log-sum-exp of those rows
    parts_barrier: Any  # words that `mosaic.open_exchange` makes a barrier


class Barriers(NamedTuple):
    """See the module's table."""

    table_ready: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    band_ready: Any
    v_ready: Any
    v_free: Any
    parts_ready: Any


def smem_types(tiling: Tiling) -> Smem:
    """Returns the buffers of a CTA as scratch types."""
    problem, stages = tiling.problem, tiling.num_stages
    dtype, head_dim = jnp.dtype(problem.dtype), problem.head_dim
    block = (tiling.token_block, problem.group)
    return Smem(
        table=seq_table.smem_type(tiling, stages),
        q_rows=plgpu.SMEM((*block, head_dim), dtype),
        q=mosaic.swizzled((tiling.columns, head_dim), dtype),
        weights=mosaic.swizzled((tiling.columns, tiling.block_kv), dtype),
        k=mosaic.swizzled((stages, tiling.block_kv, head_dim), dtype),
        v=mosaic.swizzled((stages, tiling.block_kv, head_dim), dtype),
        band=plgpu.SMEM((stages, *block, tiling.band_width), dtype),
        parts=plgpu.SMEM((head_dim, tiling.columns), jnp.float32) if tiling.ranks > 1 else None,
        part_lses=plgpu.SMEM((tiling.ranks, tiling.columns), jnp.float32) if tiling.ranks > 1 else None,
        parts_barrier=plgpu.SMEM((2,), jnp.int32) if tiling.ranks > 1 else None,
    )


def note_at(stage: jax.Array, tiling: Tiling) -> tuple[Any, Any]:
    """Returns the row and column of smem.table where the note of a stage is."""
    return seq_table.word_at(stage, tiling.num_stages, tiling)


def barrier_types(tiling: Tiling) -> Barriers:
    """Returns the barriers of a CTA as scratch types."""
    stages, copies = tiling.num_stages, tiling.block_kv // tiling.chunk
    return Barriers(
        table_ready=plgpu.Barrier(),
        q_ready=plgpu.Barrier(),
        q_free=plgpu.Barrier(),
        k_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        band_ready=plgpu.Barrier(num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
        parts_ready=plgpu.ClusterBarrier(collective_axes=("rank",)) if tiling.ranks > 1 and tiling.interpret else None,
    )
