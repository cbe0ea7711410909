"""The kernel for compute capability 10 and 11. It was interpreted and assembled, and never ran on a card."""

from inkling_pallas.kernels.blackwell.backend import (
    Config,
    Plan,
    attend,
    choose_config,
    config_fits,
    plan,
    unproven,
    unsupported,
)

__all__ = ["Config", "Plan", "attend", "choose_config", "config_fits", "plan", "unproven", "unsupported"]
