"""Other ways to compute a workload, to time beside ours.

A peer whose name ends in `_nobias` leaves the bias out: it is a floor for a kernel that must also add one.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from inkling_pallas.bench.peers.base import Peer, PeerCall, PeerSkippedError
from inkling_pallas.bench.peers.jax_libraries import (
    jax_cudnn_each_nobias,
    jax_cudnn_nobias,
    tokamax_nobias,
    tokamax_packed_nobias,
)
from inkling_pallas.bench.peers.jax_paged import jax_paged_nobias
from inkling_pallas.bench.peers.worker import WORKER_PEERS
from inkling_pallas.bench.peers.xla_dense import xla_dense
from inkling_pallas.testing.cases import Case


def jax_triton_rel(case: Case, sets: Sequence[Mapping[str, Any]]) -> PeerCall:
    """Stands in the list for a Triton kernel of the operator, so that its absence is told."""
    raise PeerSkippedError("no kernel is written: jax-triton 0.4.1 needs triton 3.7, and torch 2.11 brings 3.6")


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "jax_cudnn_nobias": jax_cudnn_nobias,
        "jax_cudnn_each_nobias": jax_cudnn_each_nobias,
        "tokamax_nobias": tokamax_nobias,
        "tokamax_packed_nobias": tokamax_packed_nobias,
        "jax_paged_nobias": jax_paged_nobias,
        "jax_triton_rel": jax_triton_rel,
        "xla_dense": xla_dense,
    }
)
ALL_PEERS = (*PEERS, *WORKER_PEERS)
