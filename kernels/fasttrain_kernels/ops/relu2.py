"""relu(x)^2, the activation of nanochat's and modded-nanogpt's feed-forward layers, in one pass.

    out = max(x, 0)^2        dx = 2 * max(x, 0) * dout

Elements moved per element of x: forward reads 1 and writes 1, backward reads 2 and writes 1. torch has two ops, which
read 2 and write 2, and keep what is between them for backward; only x is kept here.

M rows, F features.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels._checks import check_tensors, empty_like_contiguous, rows, wide
from fasttrain_kernels._launch import launch
from fasttrain_kernels._registration import call, fused_by_compiler, register, warps
from fasttrain_kernels._triton import tl, triton

_BLOCK = 1024
_THREADS = 128  # x 8 bf16: one 128-bit access per thread and tensor


def relu2_reference(x: Tensor) -> Tensor:  # (..., F) -> (..., F)
    """The specification: computed in float32, rounded once."""
    return torch.relu(wide(x)).square().to(x.dtype)


@triton.jit
def _relu2_fwd_kernel(x, out, x_stride, num_features, num_tiles, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    col = (tl.program_id(0) % num_tiles) * BLOCK + tl.arange(0, BLOCK)
    positive = tl.maximum(tl.load(x + row * x_stride + col, mask=col < num_features).to(tl.float32), 0.0)
    tl.store(out + row * num_features + col, (positive * positive).to(out.dtype.element_ty), mask=col < num_features)


@triton.jit
def _relu2_bwd_kernel(dout, x, dx, dout_stride, x_stride, num_features, num_tiles, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    col = (tl.program_id(0) % num_tiles) * BLOCK + tl.arange(0, BLOCK)
    positive = tl.maximum(tl.load(x + row * x_stride + col, mask=col < num_features).to(tl.float32), 0.0)
    do = tl.load(dout + row * dout_stride + col, mask=col < num_features).to(tl.float32)
    tl.store(dx + row * num_features + col, (2.0 * positive * do).to(dx.dtype.element_ty), mask=col < num_features)


def _tiles(x: Tensor) -> tuple[tuple[int], int, int, dict[str, int]]:  # (M, F)
    """Grid, tiles of a row, and options."""
    M, F = x.shape
    block = min(_BLOCK, triton.next_power_of_2(F))
    num_tiles = triton.cdiv(F, block)
    return (M * num_tiles,), num_tiles, F, dict(BLOCK=block, num_warps=warps(_THREADS, x.device))


def _forward(x: Tensor) -> Tensor:
    out = empty_like_contiguous(x)
    if out.numel():
        x = rows(x)
        grid, num_tiles, F, options = _tiles(x)
        launch(_relu2_fwd_kernel, grid, x, out, x.stride(0), F, num_tiles, **options)
    return out


def _backward(dout: Tensor, x: Tensor) -> Tensor:
    dx = empty_like_contiguous(x)
    if dx.numel():
        dout, x = rows(dout), rows(x)
        grid, num_tiles, F, options = _tiles(x)
        launch(_relu2_bwd_kernel, grid, dout, x, dx, dout.stride(0), x.stride(0), F, num_tiles, **options)
    return dx


def _forward_cpu(x: Tensor) -> Tensor:
    return relu2_reference(x).contiguous()


def _backward_cpu(dout: Tensor, x: Tensor) -> Tensor:
    return torch.relu(wide(x)).mul_(2).mul_(wide(dout)).to(x.dtype).contiguous()


_relu2_backward = register(
    "relu2_backward(Tensor dout, Tensor x) -> Tensor",
    triton=_backward,
    cpu=_backward_cpu,
    fake=lambda dout, x: empty_like_contiguous(x),
    inlined=True,
)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, dout: Tensor) -> Tensor:
    return call(_relu2_backward, dout, *ctx.saved_tensors)


_relu2 = register(
    "relu2(Tensor x) -> Tensor",
    triton=_forward,
    cpu=_forward_cpu,
    fake=empty_like_contiguous,
    backward=_gradient,
    setup_context=_setup_context,
    inlined=True,
)


def relu2(x: Tensor) -> Tensor:  # (..., F) -> (..., F)
    """relu(x)^2, in one pass."""
    check_tensors("relu2", x=x)
    return relu2_reference(x) if fused_by_compiler(x) else call(_relu2, x)
