"""AdamW, torch's, in one pass over weights, gradients and moments.

Weights of two or more dimensions decay, embedding and head among them; norms and biases do not. (A tied embedding is
the head as well, and decay is what bounds its logits.)
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.config import OptimConfig


def make(model: nn.Module, optim: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(model.parameters(), optim), fused=is_fused(device))


def groups(parameters: Iterable[Tensor], optim: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups with their settings: what decays, and what does not."""
    trained = [p for p in parameters if p.requires_grad]
    members = {"decay": [p for p in trained if p.ndim >= 2], "no_decay": [p for p in trained if p.ndim < 2]}
    return [dict(name=name, params=params, **settings(optim, name)) for name, params in members.items() if params]


def settings(optim: OptimConfig, group: str) -> dict[str, Any]:
    weight_decay = optim.weight_decay if group == "decay" else 0.0
    return dict(lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=weight_decay)


def is_fused(device: torch.device) -> bool | None:
    """None, torch's choice, on devices that may not have it."""
    return True if device.type in ("cpu", "cuda") else None
