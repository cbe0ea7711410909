"""The portable backend: XLA"s code for any device, tile by tile."""

from inkling_pallas.kernels.portable.backend import Config, attend, choose_config, plan, unsupported

__all__ = ["Config", "attend", "choose_config", "plan", "unsupported"]
