"""The optimizer of a run: parameter groups, learning rate, gradient norms and clipping, the loss scale of fp16.

Weights of two or more dimensions decay, embedding and head among them; norms and biases do not. (A tied embedding is
the head as well, and decay is what bounds its logits.) Under Muon the matrices of blocks are Muon's, the rest AdamW's.

The settings of every group are written anew at each step, so that a checkpoint restores moments and counts of steps
but never a learning rate: a run that is resumed with changed settings uses the changed ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fasttrain import config
from fasttrain.optim.muon import Muon


def learning_rate(optim: config.OptimConfig, step: int, steps: int) -> float:
    """Learning rate of a step (0-based) in a run of `steps`, as a fraction of the peak; past the end it stays there."""
    if step < optim.warmup:
        return (step + 1) / (optim.warmup + 1)
    if optim.schedule == "constant":
        return 1.0
    start = steps * (1 - optim.decay_fraction) if optim.schedule == "wsd" else optim.warmup
    elapsed = min(max((step - start) / (steps - start), 0.0), 1.0)  # of the decay
    remaining = 0.5 * (1 + math.cos(math.pi * elapsed)) if optim.schedule == "cosine" else 1 - elapsed
    return optim.final + (1 - optim.final) * remaining


def gradient_norms(groups: Sequence[Iterable[Tensor]]) -> Tensor:  # (groups,) float32
    """Norms of each group's gradients over all shards, in one pass and one sum over ranks; 0 without gradients.

    All ranks that share weights call it, and none waits for the result.
    """
    gradients = [[p.grad for p in group if p.grad is not None] for group in groups]
    every = [gradient for group in gradients for gradient in group]
    if not every:
        return torch.zeros(len(groups))
    norms = torch._foreach_norm([_few(_local(gradient)) for gradient in every], dtype=torch.float32)
    squares = torch.stack(norms).square()
    sums = torch.stack([group.sum() for group in squares.split([len(group) for group in gradients])])
    if shards := _shards(every[0]):
        dist.all_reduce(sums, group=shards)
    return sums.sqrt()


def _shards(gradient: Any) -> dist.ProcessGroup | None:
    """The ranks that share a gradient; replicated ones are equal."""
    mesh = getattr(gradient, "device_mesh", None)  # a DTensor's; their import costs a second
    if mesh is None:
        return None
    (dimension,) = (n for n, placement in enumerate(gradient.placements) if placement.is_shard())
    return mesh.get_group(dimension)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _few(gradient: Tensor) -> Tensor:
    """The gradient, or fewer elements with the same norm.

    torch's norm on a CPU adds one element after the other in fp32: of 20 million it is 1e-3 too small, of shards less.
    Rows first is as fast and right to 1e-7. A GPU adds in blocks already.
    """
    return (
        torch.linalg.vector_norm(gradient, dim=-1) if gradient.ndim > 1 and gradient.device.type == "cpu" else gradient
    )


def make_optimizer(model: nn.Module, optim: config.OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW, or Muon with AdamW for the rest; to be made after fully_shard, which replaces parameters.

    Blocks are what an nn.ModuleList holds. A module that packs several matrices in one parameter declares their rows as
    `muon_splits`, with names relative to itself: {"qkv.weight": (512, 128, 128)}.
    """
    named = {_plain_name(name): p for name, p in model.named_parameters()}  # a tied parameter once
    matrices = _matrices(model, named) if optim.kind == "muon" else {}
    others = [p for p in named.values() if p.requires_grad and p not in matrices]
    members = {"decay": [p for p in others if p.ndim >= 2], "no_decay": [p for p in others if p.ndim < 2]}
    groups = [
        {"name": name, "params": params, **_settings(optim, name)}
        for name, params in members.items()
        if len(params) > 0
    ]
    fused = device.type in ("cpu", "cuda")  # one pass over weights, gradients and moments; others: torch's choice
    if not matrices:
        return torch.optim.AdamW(groups, fused=fused or None)
    return Muon(matrices, groups, adjust=optim.muon_adjust, fused=fused or None, **_settings(optim, "muon"))


def set_learning_rate(optimizer: torch.optim.Optimizer, optim: config.OptimConfig, step: int, steps: int) -> float:
    """Write the settings of a step into the optimizer's groups; the learning rate of AdamW's."""
    factor = learning_rate(optim, step, steps)
    for group in optimizer.param_groups:
        settings = _settings(optim, group["name"])
        group.update(settings, lr=settings["lr"] * factor)
    return optim.lr * factor


@torch.no_grad()
def clip(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place to a norm of at most max_norm (0: leave them); the norm before, of all ranks' shards."""
    parameters = list(parameters)
    return scale_gradients(parameters, gradient_norms([parameters]), max_norm)


def scale_gradients(parameters: Iterable[Tensor], norms: Tensor, max_norm: float) -> Tensor:
    """As clip, for norms that are known, of all groups; the norm of the whole.

    The host never waits for it. One that is infinite or NaN makes every gradient NaN or zero, as in torch.
    """
    norm = torch.linalg.vector_norm(norms)
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def skip_unless_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Make the next step() change nothing if the gradient norm is infinite or NaN, without the host waiting for it.

    The norm is that of all shards, so that every rank leaves the same steps out. fp16 has its scaler for this.
    """
    # The place where a GradScaler, too, tells optimizers that update weights, moments and counts in one pass.
    optimizer.found_inf = (~norm.isfinite()).to(torch.float32)  # type: ignore[attr-defined]


def make_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """The loss scale of fp16; with any other precision, an object with the same methods that leaves everything alone.

    Under fully_shard it needs no help: torch reduces "a gradient is infinite" over all shards, so either every rank
    skips a step or none does.
    """
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def _settings(optim: config.OptimConfig, group: str) -> dict[str, Any]:
    """A group's settings at the peak of the schedule."""
    if group == "muon":
        return dict(lr=optim.muon_lr, momentum=optim.muon_momentum, weight_decay=optim.weight_decay)
    weight_decay = optim.weight_decay if group == "decay" else 0.0
    return dict(lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=weight_decay)


def _matrices(model: nn.Module, named: dict[str, nn.Parameter]) -> dict[Tensor, tuple[int, ...]]:
    """Muon's parameters, each with the rows of the matrices packed in it."""
    modules = {_plain_name(name): module for name, module in model.named_modules()}
    lists = tuple(f"{name}." for name, module in modules.items() if isinstance(module, nn.ModuleList))
    splits = {
        f"{name}.{parameter}" if name else parameter: tuple(rows)
        for name, module in modules.items()
        for parameter, rows in getattr(module, "muon_splits", {}).items()
    }
    matrices = {name: p for name, p in named.items() if p.ndim == 2 and name.startswith(lists)}
    for name, rows in splits.items():
        if name not in matrices:
            raise ValueError(f"muon_splits: {name} is not the name of a 2-D parameter of a block")
        if sum(rows) != matrices[name].size(0):
            raise ValueError(f"muon_splits: {name} {rows} must add up to its {matrices[name].size(0)} rows")
    if not any(p.requires_grad for p in matrices.values()):
        raise ValueError('optim.kind "muon": no 2-D parameter in an nn.ModuleList to train; use optim.kind "adamw"')
    return {p: splits.get(name, (p.size(0),)) for name, p in matrices.items() if p.requires_grad}


def _plain_name(name: str) -> str:
    """A module's or parameter's name without what compiling and recomputing wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))
