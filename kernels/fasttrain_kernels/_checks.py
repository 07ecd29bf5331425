"""Checks that every op makes of its tensors; errors name the op, the values and the remedy.

Checks look at shapes, dtypes and devices only: reading a value would make the host wait for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain_kernels._registration import runs_triton

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def shape(tensor: Tensor) -> tuple[int, ...]:
    """A shape that prints as (8, 16)."""
    return tuple(tensor.shape)


def check_tensors(op: str, **tensors: Tensor | None) -> None:
    """Raise unless all are floating-point tensors of a supported dtype on one device. None is skipped."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) is not Tensor:  # the usual kind needs no question more
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
            if type(tensor).__name__ == "DTensor":  # by name: importing torch.distributed.tensor costs a second
                raise TypeError(
                    f"{op}: {name} is a DTensor; kernels work on the memory of one device: call {op} inside a module "
                    f"whose parameters FSDP has gathered, or pass {name}.to_local()"
                )
        if tensor.dtype not in FLOAT_DTYPES:
            if tensor.dtype != torch.float64:
                raise TypeError(f"{op}: {name} has dtype {tensor.dtype}; supported are float32, bfloat16 and float16")
            if runs_triton(tensor):
                raise TypeError(
                    f"{op}: {name} is float64; the kernels compute in float32: use {op}_reference for float64"
                )
        if device is None:
            device, first = tensor.device, name
        elif tensor.device != device:
            raise ValueError(f"{op}: {first} is on {device} and {name} on {tensor.device}; move them to one device")


def rows(tensor: Tensor) -> Tensor:  # (..., N) -> (M, N)
    """The last dimension as contiguous rows: a view where strides allow it, otherwise a copy."""
    if tensor.shape[-1] == 0:
        return tensor.new_empty(0, 0)
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def empty_like_contiguous(tensor: Tensor) -> Tensor:
    """torch.empty_like, but always contiguous: what kernels write, and so what fakes promise."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic, of losses and of row statistics: float32, or float64 where the input is."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(tensor: Tensor) -> Tensor:
    """Cast to the dtype that references compute in."""
    return tensor.to(wide_dtype(tensor.dtype))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast asks of matmul-like ops on this tensor's device, or None outside autocast."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
