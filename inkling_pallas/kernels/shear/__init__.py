"""The kernels that write the sheared layout of the bias."""

from inkling_pallas.kernels.shear.kernel import project, shear, unsupported

__all__ = ["project", "shear", "unsupported"]
