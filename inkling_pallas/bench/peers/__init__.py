"""Other ways to compute a workload, to time beside ours."""

from inkling_pallas.bench.peers.registry import ALL_PEERS, PEERS

__all__ = ["ALL_PEERS", "PEERS"]
