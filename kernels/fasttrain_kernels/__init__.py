"""Fused training kernels in Triton, each one a registered torch op with a CPU implementation.

A name is imported when it is first used: what a program does not use costs it nothing, and the chunk rule of the loss
(loss_chunk) needs no torch.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasttrain_kernels import testing as testing
    from fasttrain_kernels.huggingface import use_kernels as use_kernels
    from fasttrain_kernels.modules import Linear as Linear
    from fasttrain_kernels.modules import LinearCrossEntropyLoss as LinearCrossEntropyLoss
    from fasttrain_kernels.modules import RMSNorm as RMSNorm
    from fasttrain_kernels.modules import SwiGLU as SwiGLU
    from fasttrain_kernels.ops.attention.intervals import document_bounds as document_bounds
    from fasttrain_kernels.ops.attention.op import attention as attention
    from fasttrain_kernels.ops.attention.op import attention_backend as attention_backend
    from fasttrain_kernels.ops.attention.op import explain_attention_backend as explain_attention_backend
    from fasttrain_kernels.ops.attention.reference import attention_reference as attention_reference
    from fasttrain_kernels.ops.linear import linear as linear
    from fasttrain_kernels.ops.linear_cross_entropy.chunks import LossChunk as LossChunk
    from fasttrain_kernels.ops.linear_cross_entropy.chunks import loss_chunk as loss_chunk
    from fasttrain_kernels.ops.linear_cross_entropy.op import linear_cross_entropy as linear_cross_entropy
    from fasttrain_kernels.ops.linear_cross_entropy.op import linear_cross_entropy_stats as linear_cross_entropy_stats
    from fasttrain_kernels.ops.linear_cross_entropy.reference import TokenStats as TokenStats
    from fasttrain_kernels.ops.linear_cross_entropy.reference import (
        linear_cross_entropy_reference as linear_cross_entropy_reference,
    )
    from fasttrain_kernels.ops.linear_cross_entropy.reference import (
        linear_cross_entropy_stats_reference as linear_cross_entropy_stats_reference,
    )
    from fasttrain_kernels.ops.qk_norm_rope.op import qk_norm_rope as qk_norm_rope
    from fasttrain_kernels.ops.qk_norm_rope.reference import qk_norm_rope_reference as qk_norm_rope_reference
    from fasttrain_kernels.ops.qk_norm_rope.reference import rotary_table as rotary_table
    from fasttrain_kernels.ops.rms_norm import add_rms_norm as add_rms_norm
    from fasttrain_kernels.ops.rms_norm import add_rms_norm_reference as add_rms_norm_reference
    from fasttrain_kernels.ops.rms_norm import rms_norm as rms_norm
    from fasttrain_kernels.ops.rms_norm import rms_norm_reference as rms_norm_reference
    from fasttrain_kernels.ops.swiglu import swiglu as swiglu
    from fasttrain_kernels.ops.swiglu import swiglu_linear as swiglu_linear
    from fasttrain_kernels.ops.swiglu import swiglu_linear_reference as swiglu_linear_reference
    from fasttrain_kernels.ops.swiglu import swiglu_reference as swiglu_reference

_MODULES = {  # as above, for programs that run (tests/kernels/test_package.py compares)
    "huggingface": ("use_kernels",),
    "modules": ("Linear", "LinearCrossEntropyLoss", "RMSNorm", "SwiGLU"),
    "ops.attention.intervals": ("document_bounds",),
    "ops.attention.op": ("attention", "attention_backend", "explain_attention_backend"),
    "ops.attention.reference": ("attention_reference",),
    "ops.linear": ("linear",),
    "ops.linear_cross_entropy.chunks": ("LossChunk", "loss_chunk"),
    "ops.linear_cross_entropy.op": ("linear_cross_entropy", "linear_cross_entropy_stats"),
    "ops.linear_cross_entropy.reference": (
        "TokenStats", "linear_cross_entropy_reference", "linear_cross_entropy_stats_reference",
    ),
    "ops.qk_norm_rope.op": ("qk_norm_rope",),
    "ops.qk_norm_rope.reference": ("qk_norm_rope_reference", "rotary_table"),
    "ops.rms_norm": ("add_rms_norm", "add_rms_norm_reference", "rms_norm", "rms_norm_reference"),
    "ops.swiglu": ("swiglu", "swiglu_linear", "swiglu_linear_reference", "swiglu_reference"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_LISTED = {*_MODULES}
for _file in sorted(Path(__file__).with_name("ops").glob("[a-z]*.py")):  # an op that is one file: itself, its reference
    if f"ops.{_file.stem}" not in _LISTED:
        _MODULE_OF |= {_file.stem: f"ops.{_file.stem}", f"{_file.stem}_reference": f"ops.{_file.stem}"}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name == "testing":  # needs numpy and ml_dtypes
        return importlib.import_module("fasttrain_kernels.testing")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fasttrain_kernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fasttrain_kernels.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # the next use finds it at once
    return value
