"""Other ways to compute a workload, to time beside ours.

A peer whose name ends in `_nobias` leaves the bias out: it is a floor for a kernel that must also add one.
"""

from collections.abc import Mapping
from types import MappingProxyType

from inkling_pallas.peer_call import Peer
from inkling_pallas.peer_dense import xla_dense
from inkling_pallas.peer_libraries import (
    jax_cudnn_each_nobias,
    jax_cudnn_nobias,
    tokamax_nobias,
    tokamax_packed_nobias,
)
from inkling_pallas.peer_paged import jax_paged_nobias
from inkling_pallas.peer_workers import WORKER_PEERS

PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "jax_cudnn_nobias": jax_cudnn_nobias,
        "jax_cudnn_each_nobias": jax_cudnn_each_nobias,
        "tokamax_nobias": tokamax_nobias,
        "tokamax_packed_nobias": tokamax_packed_nobias,
        "jax_paged_nobias": jax_paged_nobias,
        "xla_dense": xla_dense,
    }
)
ALL_PEERS = (*PEERS, *WORKER_PEERS)
