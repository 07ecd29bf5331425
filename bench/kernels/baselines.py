"""The implementations of each op, ours and the baselines: functions of the op's inputs with its reference's outputs.

An implementation is made when it is first run: only then is a package imported, or something compiled.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fasttrain_kernels as ft
from bench.kernels.ops import OPS
from fasttrain_kernels.testing.specs import EPS

OURS, EAGER = "fasttrain", "eager"
OURS_COMPILED = "fasttrain, compiled"  # on a CPU the compiler fuses streaming ops: as in a training run
Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class OpImplementation:
    make: Callable[[], Function]
    package: str = ""  # that it needs
    gpu_only: bool = False
    half_only: bool = False

    def missing(self, device: str, dtype: torch.dtype) -> str:
        """Return why it cannot run here; "" if it can."""
        if self.gpu_only and device != "cuda":
            return f"{self.package} needs a GPU"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed: pip install -c constraints.txt -e '.[baselines]'"
        if self.half_only and dtype.itemsize != 2:
            return f"{self.package} takes 16-bit inputs only"
        return ""


def implementations(op: str, device: str) -> dict[str, OpImplementation]:
    eager = OPS[op].eager
    ours = attention if op == "attention" else getattr(ft, op)
    found = {
        OURS: OpImplementation(make=lambda: ours),
        EAGER: OpImplementation(make=lambda: eager),
        "compiled": OpImplementation(make=lambda: torch.compile(eager, dynamic=False)),
    }
    if device == "cpu" and OPS[op].streaming:
        found[OURS_COMPILED] = OpImplementation(make=lambda: torch.compile(ours, dynamic=False))
    return found | _OTHERS.get(op, {})


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our own kernel, not what "auto" picks: that may be SDPA, which is a baseline itself."""
    return ft.attention(q, k, v, backend="triton" if q.is_cuda else "auto")


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, EPS), total


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def torch_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.linear_cross_entropy(hidden, weight, target, options=torch.nn.LinearCrossEntropyOptions())


def liger_rms_norm() -> Function:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # in_place=False: it would write the gradient over the upstream one, which the next round needs
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def liger_add_rms_norm() -> Function:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", False)


def liger_qk_norm_rope() -> Function:
    """Two launches of its norm and one of its rotary embedding, which wants heads before tokens."""
    from liger_kernel.ops.rope import LigerRopeFunction

    norm = liger_rms_norm()

    def run(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        cos, sin = (torch.cat((table, table), -1)[None].to(q.dtype) for table in (cos, sin))
        q, k = norm(q, q_weight).transpose(1, 2), norm(k, k_weight).transpose(1, 2)
        return tuple(x.transpose(1, 2) for x in LigerRopeFunction.apply(q, k, cos, sin))

    return run


def liger_linear_cross_entropy() -> Function:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, target: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]


def liger_swiglu() -> Function:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up)


def cut_cross_entropy() -> Function:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target)


def _torch(function: Function) -> dict[str, OpImplementation]:
    return {"torch": OpImplementation(make=lambda: function)}


def _liger(make: Callable[[], Function]) -> dict[str, OpImplementation]:
    return {"Liger": OpImplementation(make=make, package="liger_kernel", gpu_only=True)}


_OTHERS = {
    "rms_norm": _torch(torch_rms_norm) | _liger(liger_rms_norm),
    "add_rms_norm": _torch(torch_add_rms_norm) | _liger(liger_add_rms_norm),
    "qk_norm_rope": _liger(liger_qk_norm_rope),
    "attention": _torch(torch_attention),
    "linear_cross_entropy": _torch(torch_linear_cross_entropy)
    | _liger(liger_linear_cross_entropy)
    | {
        "cut-cross-entropy": OpImplementation(
            make=cut_cross_entropy, package="cut_cross_entropy", gpu_only=True, half_only=True
        )
    },
    "swiglu": _liger(liger_swiglu),
}
