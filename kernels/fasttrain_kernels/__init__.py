"""Fused training kernels in Triton, each one a registered torch op with a CPU form."""

from fasttrain_kernels.swiglu import swiglu, swiglu_reference

__all__ = ["swiglu", "swiglu_reference"]
