"""Fused training kernels in Triton, each one a registered torch op with a CPU implementation."""

import importlib
from types import ModuleType

from fasttrain_kernels.attention import (
    attention,
    attention_backend,
    attention_reference,
    explain_attention_backend,
)
from fasttrain_kernels.huggingface import use_kernels
from fasttrain_kernels.linear import linear
from fasttrain_kernels.linear_cross_entropy import (
    LossChunk,
    TokenStats,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_stats,
    linear_cross_entropy_stats_reference,
    loss_chunk,
)
from fasttrain_kernels.modules import Linear, LinearCrossEntropyLoss, RMSNorm, SwiGLU
from fasttrain_kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference, rotary_table
from fasttrain_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from fasttrain_kernels.swiglu import swiglu, swiglu_reference

__all__ = [
    "Linear",
    "LinearCrossEntropyLoss",
    "LossChunk",
    "RMSNorm",
    "SwiGLU",
    "TokenStats",
    "add_rms_norm",
    "add_rms_norm_reference",
    "attention",
    "attention_backend",
    "attention_reference",
    "explain_attention_backend",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_cross_entropy_stats",
    "linear_cross_entropy_stats_reference",
    "loss_chunk",
    "qk_norm_rope",
    "qk_norm_rope_reference",
    "rms_norm",
    "rms_norm_reference",
    "rotary_table",
    "swiglu",
    "swiglu_reference",
    "use_kernels",
]


def __getattr__(name: str) -> ModuleType:
    if name == "testing":  # imported when it is first used: it needs numpy and ml_dtypes
        return importlib.import_module("fasttrain_kernels.testing")
    raise AttributeError(f"module 'fasttrain_kernels' has no attribute {name!r}")
