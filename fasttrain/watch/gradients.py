"""The gradient norm of each block, on the device: nothing waits for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def block_norms(blocks: Iterable[nn.Module], shards: dist.ProcessGroup | None = None) -> Tensor:  # (blocks,) float32
    """After backward, before gradients are cleared. shards: the ranks that share the weights; all of them call."""
    squares = torch.stack([_square(block) for block in blocks])
    if shards is not None:
        dist.all_reduce(squares, group=shards)
    return squares.sqrt()


def _square(block: nn.Module) -> Tensor:
    gradients = [_local(p.grad) for p in block.parameters() if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=next(block.parameters()).device)
    norms = torch._foreach_norm(gradients, dtype=torch.float32)
    return torch.stack(norms).square().sum()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
