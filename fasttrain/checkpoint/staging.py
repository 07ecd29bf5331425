"""Staging: a copy of the state in host memory, so that training may change the state while the copy is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Staging:
    """Buffers for one state. They are kept from save to save, since pinning memory takes longer than copying to it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state as it is now; valid until the next copy. Every tensor is copied once."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in state.items()}
        for name, tensor in state.items():
            _local(self._buffers[name]).copy_(_local(tensor), non_blocking=True)
        if any(tensor.device.type != "cpu" for tensor in state.values()):
            torch.accelerator.synchronize()  # the caller is about to change what is being copied
        return self._buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        former = self._buffers.get(name)
        if former is not None and _layout(former) == _layout(tensor):
            return former
        # Of a DTensor, this is a DTensor: the mesh may be one of GPUs while the shard is in host memory
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda", requires_grad=False)


def _layout(tensor: Any) -> tuple[Any, ...]:
    return type(tensor), tensor.shape, tensor.dtype, _local(tensor).shape, getattr(tensor, "placements", None)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
