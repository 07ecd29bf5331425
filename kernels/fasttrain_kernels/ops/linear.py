"""The matmul of a linear layer: x @ weight.T.

torch's own, except in float32 on those CPUs where ours (cpp/matmul.cpp) is faster than its BLAS. With ours, a row of
the result does not depend on how many others there are.

M rows, K features, N outputs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.profiler import record_function

from fasttrain_kernels import cpp
from fasttrain_kernels._checks import autocast_dtype
from fasttrain_kernels._registration import call, register, runs_triton


def matmul_out(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool = False) -> None:  # (M, K), (K, N), (M, N)
    """Write out = a @ b, or add a @ b to out, all of one dtype, by the faster of our matmul and torch's."""
    if _is_ours(a, a.shape[0], a.shape[1], b.shape[1]) and out.stride(1) == 1:
        # Beside aten::mm in a profile, in whatever op it is
        with record_function("fasttrain::matmul") if torch.autograd._profiler_enabled() else nullcontext():
            cpp.matmul(a, b, out, accumulate=accumulate)
    else:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)


def linear(x: Tensor, weight: Tensor) -> Tensor:  # (..., K), (N, K) -> (..., N)
    """F.linear without a bias."""
    if _is_plain(x, weight) and _is_ours(x, x.shape[:-1].numel(), weight.shape[1], weight.shape[0]):
        return call(matmul, x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])
    return F.linear(x, weight)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether torch would do no more than the matmul: no autocast, no DTensor, no error."""
    matching = x.dim() > 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    sharded = type(weight).__name__ == "DTensor"  # by name: importing torch.distributed.tensor costs a second
    return matching and not (sharded or runs_triton(x) or autocast_dtype(x))


def _is_ours(x: Tensor, M: int, K: int, N: int) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32 or (least := cpp.faster_matmuls()) is None:
        return False
    side, multiplies = least
    return min(M, N) >= side and multiplies <= M * N * K


def _matmul_cpu(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    matmul_out(a, b, out)
    return out


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    need_da, need_db = ctx.needs_input_grad
    return call(matmul, dout, b.t()) if need_da else None, call(matmul, a.t(), dout) if need_db else None


matmul = register(
    "matmul(Tensor a, Tensor b) -> Tensor",
    triton=torch.mm,
    cpu=_matmul_cpu,
    fake=lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
    backward=_gradient,
    setup_context=_setup_context,
)
