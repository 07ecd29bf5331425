"""The launch configurations that fasttrain ships: public ops, called forward and backward as training calls them.

A case covers what distinguishes binaries: dtype, row length, head dimension, and the options that select code. Sizes
that do not (tokens, heads, features beyond a tile) are those of real models. Nothing is executed, no memory is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels.ops.attention.op import attention
from fasttrain_kernels.ops.linear_cross_entropy.op import linear_cross_entropy, linear_cross_entropy_stats
from fasttrain_kernels.ops.qk_norm_rope.op import qk_norm_rope
from fasttrain_kernels.ops.rms_norm import add_rms_norm, rms_norm
from fasttrain_kernels.ops.swiglu import swiglu, swiglu_linear

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_TOKENS = 8192


class Reach(Enum):
    """The targets that a case is compiled for: everything for every target would take half an hour."""

    CORE = "every target, also in a quick survey: the commonest shape; together these launch every kernel"
    TILES = "every target: the other entries of the launch tables, which are what may spill or not fit somewhere"
    OPTIONS = "sm_90: the same tiles with another dtype or option"


@dataclass(frozen=True)
class CompileCase:
    """One call of an op, forward and backward."""

    name: str  # starts with the dtype
    reach: Reach
    run: Callable[[], None]


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def train(function: Callable[..., Any], *tensors: Tensor | None, **options: Any) -> None:
    """Forward, and backward for every input that may have a gradient."""
    outputs = function(*tensors, **options)
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.requires_grad]
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    torch.autograd.grad(outputs, wanted, [torch.empty_like(o) for o in outputs])


def train_on(function: Callable[..., Any], dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
    train(function, *(empty(*shape, dtype=dtype) for shape in shapes))


def _swiglu(dtype: torch.dtype, F: int, packed: bool = False) -> None:
    shapes = [(_TOKENS, 2 * F)] if packed else [(_TOKENS, F), (_TOKENS, F)]
    train(swiglu, *(empty(*shape, dtype=dtype) for shape in shapes))


def _swiglu_linear(dtype: torch.dtype, F: int) -> None:
    # Few tokens and outputs: the matmuls do run. The kernels see neither number.
    train(swiglu_linear, empty(16, 2 * F, dtype=dtype), empty(16, F, dtype=dtype))


def _rms_norm(dtype: torch.dtype, N: int, weight: torch.dtype | None, **options: Any) -> None:
    train(rms_norm, empty(_TOKENS, N, dtype=dtype), empty(N, dtype=weight) if weight else None, **options)


def _add_rms_norm(dtype: torch.dtype, N: int) -> None:
    x, residual = empty(_TOKENS, N, dtype=dtype), empty(_TOKENS, N, dtype=dtype)
    train(add_rms_norm, x, residual, empty(N, dtype=dtype))


def _packed_qkv(dtype: torch.dtype, Hq: int, Hk: int, D: int) -> tuple[Tensor, ...]:
    """q, k, v as views of one projection of two sequences."""
    return empty(2, _TOKENS // 2, Hq + 2 * Hk, D, dtype=dtype).split([Hq, Hk, Hk], dim=2)


def _qk_norm_rope(
    dtype: torch.dtype, Hq: int, Hk: int, D: int, *,
    norm: bool = True, rotated: int | None = None, positions: bool = False, **options: Any,
) -> None:  # fmt: skip
    q, k, _ = _packed_qkv(dtype, Hq, Hk, D)
    weights = [empty(D, dtype=dtype) if norm else None for _ in "qk"]
    tables = [torch.empty(_TOKENS, (rotated or D) // 2) for _ in ("cos", "sin")]
    where = torch.empty(2, _TOKENS // 2, dtype=torch.int64) if positions else None
    train(qk_norm_rope, q, k, *weights, *tables, positions=where, **options)


def _attention(
    dtype: torch.dtype, Hq: int, Hk: int, D: int, *,
    one_query: bool = False, documents: bool = False, **options: Any,
) -> None:  # fmt: skip
    cu_seqlens = torch.arange(0, _TOKENS + 1, 1024, dtype=torch.int32) if documents else None
    q, k, v = _packed_qkv(dtype, Hq, Hk, D)
    train(attention, q[:, -1:] if one_query else q, k, v, cu_seqlens=cu_seqlens, backend="triton", **options)


def _linear_cross_entropy(dtype: torch.dtype, V: int, **options: Any) -> None:
    # Few tokens and features: the matmuls of this op are BLAS and do run. The kernel sees neither number.
    hidden, weight = empty(16, 16, dtype=dtype), empty(V, 16, dtype=dtype)
    train(linear_cross_entropy, hidden, weight, torch.zeros(16, dtype=torch.int64), **options)


def _linear_cross_entropy_stats(dtype: torch.dtype, V: int) -> None:
    hidden, weight = torch.zeros(16, 16, dtype=dtype), torch.zeros(V, 16, dtype=dtype)
    linear_cross_entropy_stats(hidden, weight, torch.zeros(16, dtype=torch.int64))


SWIGLU = [
    CompileCase("bf16 F=14336", Reach.CORE, partial(_swiglu, _BF16, 14336)),
    CompileCase("bf16 F=3072 packed", Reach.OPTIONS, partial(_swiglu, _BF16, 3072, packed=True)),
    CompileCase("bf16 F=3072 with its projection", Reach.OPTIONS, partial(_swiglu_linear, _BF16, 3072)),
    CompileCase("fp16 F=14336", Reach.OPTIONS, partial(_swiglu, _FP16, 14336)),
    CompileCase("fp32 F=14336", Reach.OPTIONS, partial(_swiglu, _FP32, 14336)),
]
LINEAR_CROSS_ENTROPY = [
    CompileCase("bf16 V=151936", Reach.CORE, partial(_linear_cross_entropy, _BF16, 151936)),
    CompileCase("bf16 V=50257 evaluation", Reach.CORE, partial(_linear_cross_entropy_stats, _BF16, 50257)),
    CompileCase("bf16 V=50257", Reach.TILES, partial(_linear_cross_entropy, _BF16, 50257)),  # not a multiple of 16
    CompileCase("bf16 V=256000 softcap", Reach.TILES, partial(_linear_cross_entropy, _BF16, 256000, softcap=30.0)),
    CompileCase("fp32 V=50304", Reach.TILES, partial(_linear_cross_entropy, _FP32, 50304)),
    CompileCase("fp16 V=128256", Reach.OPTIONS, partial(_linear_cross_entropy, _FP16, 128256)),
    CompileCase(
        "bf16 V=128256 z-loss smoothing",
        Reach.OPTIONS,
        partial(_linear_cross_entropy, _BF16, 128256, z_loss=1e-4, label_smoothing=0.1),
    ),
    CompileCase(
        "bf16 V=128256 per token", Reach.OPTIONS, partial(_linear_cross_entropy, _BF16, 128256, reduction="none")
    ),
]
ADD_RMS_NORM = [
    CompileCase("bf16 N=4096", Reach.CORE, partial(_add_rms_norm, _BF16, 4096)),
    CompileCase("bf16 N=768", Reach.TILES, partial(_add_rms_norm, _BF16, 768)),
    CompileCase("bf16 N=2048", Reach.TILES, partial(_add_rms_norm, _BF16, 2048)),
    CompileCase("bf16 N=5120", Reach.TILES, partial(_add_rms_norm, _BF16, 5120)),
    CompileCase("bf16 N=16384", Reach.TILES, partial(_add_rms_norm, _BF16, 16384)),
    CompileCase("fp32 N=4096", Reach.TILES, partial(_add_rms_norm, _FP32, 4096)),
    CompileCase("fp16 N=4096", Reach.OPTIONS, partial(_add_rms_norm, _FP16, 4096)),
]
QK_NORM_ROPE = [
    CompileCase("bf16 D=128", Reach.CORE, partial(_qk_norm_rope, _BF16, 32, 8, 128)),
    CompileCase("bf16 D=64 12+12 heads", Reach.TILES, partial(_qk_norm_rope, _BF16, 12, 12, 64)),
    CompileCase("bf16 D=256 16+2 heads", Reach.TILES, partial(_qk_norm_rope, _BF16, 16, 2, 256)),
    CompileCase("bf16 D=128 half rotated", Reach.TILES, partial(_qk_norm_rope, _BF16, 32, 8, 128, rotated=64)),
    CompileCase("bf16 D=128 interleaved", Reach.OPTIONS, partial(_qk_norm_rope, _BF16, 32, 8, 128, interleaved=True)),
    CompileCase("bf16 D=128 positions", Reach.OPTIONS, partial(_qk_norm_rope, _BF16, 32, 8, 128, positions=True)),
    CompileCase("bf16 D=128 no norm", Reach.OPTIONS, partial(_qk_norm_rope, _BF16, 32, 8, 128, norm=False)),
    CompileCase("fp16 D=128", Reach.OPTIONS, partial(_qk_norm_rope, _FP16, 32, 8, 128)),
    CompileCase("fp32 D=128", Reach.OPTIONS, partial(_qk_norm_rope, _FP32, 32, 8, 128)),
]
RMS_NORM = [
    CompileCase("bf16 N=4096", Reach.CORE, partial(_rms_norm, _BF16, 4096, _BF16)),
    CompileCase("bf16 N=768", Reach.TILES, partial(_rms_norm, _BF16, 768, _BF16)),
    CompileCase("bf16 N=1024", Reach.TILES, partial(_rms_norm, _BF16, 1024, _BF16)),
    CompileCase("bf16 N=2048", Reach.TILES, partial(_rms_norm, _BF16, 2048, _BF16)),
    CompileCase("bf16 N=5120", Reach.TILES, partial(_rms_norm, _BF16, 5120, _BF16)),
    CompileCase("bf16 N=8192", Reach.TILES, partial(_rms_norm, _BF16, 8192, _BF16)),
    CompileCase("bf16 N=16384", Reach.TILES, partial(_rms_norm, _BF16, 16384, _BF16)),
    CompileCase("fp32 N=768", Reach.TILES, partial(_rms_norm, _FP32, 768, _FP32)),
    CompileCase("fp32 N=4096", Reach.TILES, partial(_rms_norm, _FP32, 4096, _FP32)),
    CompileCase("fp32 N=8192", Reach.TILES, partial(_rms_norm, _FP32, 8192, _FP32)),
    CompileCase("fp16 N=4096", Reach.OPTIONS, partial(_rms_norm, _FP16, 4096, _FP16)),
    CompileCase("bf16 N=4096 fp32 weight", Reach.OPTIONS, partial(_rms_norm, _BF16, 4096, _FP32)),
    CompileCase("bf16 N=4096 no weight", Reach.OPTIONS, partial(_rms_norm, _BF16, 4096, None)),
    CompileCase("bf16 N=4096 offset", Reach.OPTIONS, partial(_rms_norm, _BF16, 4096, _BF16, offset=1.0)),
]
ATTENTION = [
    CompileCase("bf16 D=128 documents", Reach.CORE, partial(_attention, _BF16, 32, 8, 128, documents=True)),
    CompileCase("bf16 D=128", Reach.TILES, partial(_attention, _BF16, 32, 8, 128)),
    CompileCase("bf16 D=64", Reach.TILES, partial(_attention, _BF16, 12, 12, 64)),
    CompileCase("bf16 D=256", Reach.TILES, partial(_attention, _BF16, 16, 2, 256)),
    CompileCase("bf16 D=128 softcap", Reach.TILES, partial(_attention, _BF16, 32, 8, 128, softcap=50.0)),
    CompileCase("fp32 D=64", Reach.TILES, partial(_attention, _FP32, 12, 12, 64)),
    CompileCase("fp32 D=128", Reach.TILES, partial(_attention, _FP32, 32, 8, 128)),
    CompileCase("fp32 D=128 one query", Reach.TILES, partial(_attention, _FP32, 32, 8, 128, one_query=True)),
    CompileCase("fp32 D=256", Reach.OPTIONS, partial(_attention, _FP32, 16, 2, 256)),
    CompileCase("fp32 D=64 one query", Reach.OPTIONS, partial(_attention, _FP32, 12, 12, 64, one_query=True)),
    CompileCase("fp32 D=256 one query", Reach.OPTIONS, partial(_attention, _FP32, 16, 2, 256, one_query=True)),
    CompileCase("fp32 D=64 softcap", Reach.OPTIONS, partial(_attention, _FP32, 12, 12, 64, softcap=50.0)),
    CompileCase("bf16 D=64 softcap", Reach.OPTIONS, partial(_attention, _BF16, 12, 12, 64, softcap=50.0)),
    CompileCase("fp16 D=128", Reach.OPTIONS, partial(_attention, _FP16, 32, 8, 128)),
    CompileCase("bf16 D=96", Reach.OPTIONS, partial(_attention, _BF16, 32, 32, 96)),  # does not fill its tile
    CompileCase("bf16 D=128 full", Reach.OPTIONS, partial(_attention, _BF16, 32, 8, 128, causal=False)),
    CompileCase("bf16 D=128 window", Reach.OPTIONS, partial(_attention, _BF16, 32, 8, 128, window=1024)),
]
