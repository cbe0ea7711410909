"""The kernels for compute capability 9.0 (sm_90a): decode with split keys, and prefill."""

from inkling_pallas.kernels.hopper.backend import Config, Plan, attend, choose_config, config_fits, plan, unsupported

__all__ = ["Config", "Plan", "attend", "choose_config", "config_fits", "plan", "unsupported"]
