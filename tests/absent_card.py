"""A card that is not there: compile for it where jax's plugin and ptxas are; say what is missing elsewhere."""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from jax.experimental import topologies

# What XLA asks of a compile-only device.
_CARD = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {cache}
  clock_rate_ghz: {clock} device_memory_size: {memory} shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: 0 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "NVIDIA {name}"
"""
_SIZES = {
    "H200": {
        "cores": 132,
        "bandwidth": 4800000000000,
        "cache": 62914560,
        "clock": 1.98,
        "memory": 150000000000,
        "major": 9,
    },
    "B200": {
        "cores": 148,
        "bandwidth": 8000000000000,
        "cache": 132644864,
        "clock": 1.92,
        "memory": 190000000000,
        "major": 10,
    },
}
_CARDS: dict[str, str] = {}


def missing() -> str | None:
    """Returns what a compile without a card lacks here, or None."""
    try:
        found = importlib.util.find_spec("jax_plugins.xla_cuda13")
    except ModuleNotFoundError:  # not even the package that plugins stand in
        found = None
    if found is None:
        return "jax-cuda13-plugin is not installed"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "ptxas"
    return None if shutil.which("ptxas") or toolkit.exists() else "there is no ptxas"


def device(name: str = "H200") -> Any:
    """Returns the compile-only device."""
    return devices(1, name)[0]


def devices(count: int, name: str = "H200") -> list[Any]:
    """Returns several compile-only devices of one host; in a process always of one card.

    jax 0.11.2 gives the pass that calls ptxas the architecture of the first kernel that a process compiles, and keeps
    it: kernels for another card fail to compile, "Pass pipeline failed", whichever comes second.
    """
    if _CARDS.setdefault("of this process", name) != name:
        raise RuntimeError(f"a process must compile for one card; got {name}. Compile for it in a process of its own.")
    config = _CARD.format(name=name, **_SIZES[name])
    return topologies.get_topology_desc("", platform="cuda", target_config=config, topology=f"1x1x{count}").devices
