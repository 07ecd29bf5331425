"""Modules around the ops, where people expect a module."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fasttrain_kernels.ops.linear import linear
from fasttrain_kernels.ops.linear_cross_entropy.op import linear_cross_entropy
from fasttrain_kernels.ops.rms_norm import rms_norm
from fasttrain_kernels.ops.swiglu import swiglu, swiglu_linear


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm, constructor and state dict included, on rms_norm."""

    def forward(self, x: Tensor) -> Tensor:  # (..., *normalized_shape)
        if tuple(x.shape[-len(self.normalized_shape) :]) != tuple(self.normalized_shape):
            raise ValueError(f"RMSNorm: input {tuple(x.shape)} must end in normalized_shape {self.normalized_shape}")
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps  # as torch.nn.RMSNorm chooses it
        if len(self.normalized_shape) == 1:
            return rms_norm(x, self.weight, eps=eps)
        size = math.prod(self.normalized_shape)
        flat = x.reshape(*x.shape[: -len(self.normalized_shape)], size)
        weight = None if self.weight is None else self.weight.reshape(size)
        return rms_norm(flat, weight, eps=eps).reshape(x.shape)


class Linear(nn.Linear):
    """torch.nn.Linear, constructor and state dict included, on linear; with a bias, torch's own."""

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        return linear(x, self.weight) if self.bias is None else super().forward(x)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up as one packed projection."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = Linear(in_features, 2 * hidden_features, bias=bias, device=device, dtype=dtype)
        self.down = Linear(hidden_features, in_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., in_features)
        gate_up = self.gate_up(x)
        return swiglu_linear(gate_up, self.down.weight) if self.down.bias is None else self.down(swiglu(gate_up))


class LinearCrossEntropyLoss(nn.Module):
    """The head and its loss: torch.nn.LinearCrossEntropyLoss's parameters, state dict and options, plus ours."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=False, device=device, dtype=dtype)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:  # (..., in_features), (...)
        return linear_cross_entropy(
            hidden,
            self.linear.weight,
            target,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )
