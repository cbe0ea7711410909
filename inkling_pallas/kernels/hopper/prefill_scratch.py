"""Memory and barriers of the prefill kernel, and its protocol.

Two warpgroups compute, w = 0 and 1; the warps of a third copy. K and V come for all CTAs of a cluster, so all of them
must have let a stage go.

| barrier | arrives | waits | guards |
|---|---|---|---|
| k_ready, k_free [stage] | copies of K; both warpgroups, in a cluster of all CTAs | both; warp 0 | .k, .absent |
| v_ready, v_free [stage] | copies of V; both warpgroups, in a cluster of all CTAs | both; warp 1 | smem.v[stage] |
| v_clear [stage] | warpgroup 0, only in tiles that it clears | warpgroup 1 | smem.v[stage] |
| band_ready, band_free [slot, w] | copy of rel_logits or q; warpgroup w | warpgroup w; warp 2 | smem.band[slot, w] |
| q_ready, q_free [w] | copy of q; warpgroup w | warpgroup w; warp 3 | smem.q[w], where q has its own buffer |
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.phases import pages
from inkling_pallas.kernels.schedule.tiling import WARPGROUPS, RowTiling


class Smem(NamedTuple):
    """Buffers of a CTA. `queries` is None where query rows share the ring of bias blocks."""

    k: Any
    v: Any
    band: Any
    queries: Any
    absent: Any  # which chunks of a KV tile have no page


class Barriers(NamedTuple):
    """See the module's table."""

    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    v_clear: Any
    band_ready: Any
    band_free: Any
    q_ready: Any
    q_free: Any


def smem_types(tiling: RowTiling) -> Smem:
    """Returns the buffers of a CTA as scratch types."""
    problem, stages = tiling.problem, tiling.num_stages
    dtype = jnp.dtype(problem.dtype)
    cache = mosaic.swizzled((stages, tiling.block_kv, problem.head_dim), dtype)
    block = (WARPGROUPS, tiling.token_block, problem.group)
    own = None if tiling.shares_ring else plgpu.SMEM((*block, tiling.query_width), dtype)
    band = plgpu.SMEM((tiling.band_slots, *block, tiling.band_width), dtype)
    return Smem(k=cache, v=cache, band=band, queries=own, absent=pages.notes_type(tiling, stages))


def barrier_types(tiling: RowTiling) -> Barriers:
    """Returns the barriers of a CTA as scratch types."""
    stages, copies = tiling.num_stages, tiling.block_kv // tiling.chunk
    slots = tiling.band_slots * WARPGROUPS
    return Barriers(
        k_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        k_free=_stage_free(tiling),
        v_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_free=_stage_free(tiling),
        v_clear=plgpu.Barrier(num_barriers=stages),
        band_ready=plgpu.Barrier(num_barriers=slots),
        band_free=plgpu.Barrier(num_barriers=slots),
        q_ready=plgpu.Barrier(num_barriers=WARPGROUPS),
        q_free=plgpu.Barrier(num_barriers=WARPGROUPS),
    )


def _stage_free(tiling: RowTiling) -> Any:
    arrivals: dict[str, Any] = {"num_arrivals": WARPGROUPS, "num_barriers": tiling.num_stages}
    if tiling.cluster_axis is None:
        return plgpu.Barrier(**arrivals)
    return plgpu.ClusterBarrier(collective_axes=(tiling.cluster_axis,), **arrivals)


def smem_bytes(tiling: RowTiling) -> int:
    """Returns what the buffers take."""
    cache = 2 * tiling.num_stages * tiling.block_kv * tiling.problem.head_dim
    widths = tiling.band_slots * tiling.band_width + (0 if tiling.shares_ring else tiling.query_width)
    return 2 * (cache + WARPGROUPS * tiling.rows * widths) + 4 * tiling.num_stages


def query_slot(smem: Smem, slot: Any, warpgroup: Any) -> Any:
    """Returns where a warpgroup's query rows go, [token_block, group, query_width]."""
    return smem.band.at[slot, warpgroup] if smem.queries is None else smem.queries.at[warpgroup]
