"""Fused training kernels in Triton, each one a registered torch op with a CPU form."""

from fasttrain_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from fasttrain_kernels.swiglu import swiglu, swiglu_reference

__all__ = [
    "add_rms_norm",
    "add_rms_norm_reference",
    "rms_norm",
    "rms_norm_reference",
    "swiglu",
    "swiglu_reference",
]
