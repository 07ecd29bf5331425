"""The optimizer of a run: what builds it, learning rate, gradient norms and clipping, the loss scale of fp16.

    optimizer = make_optimizer(model, optim, device)        # after fully_shard, which replaces parameters
    scaler = make_scaler(precision, device)                 # does nothing unless precision is fp16
    for step in ...:
        set_learning_rate(optimizer, optim, step, steps)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip(model.parameters(), optim.clip)
        skip_unless_finite(optimizer, norm)                 # not with fp16: its scaler does
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

The settings of every group are written anew at each step, so that a checkpoint restores moments and counts of steps
but never a learning rate: a run that is resumed with changed settings uses the changed ones.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fasttrain import config
from fasttrain.optimizers import OPTIMIZERS


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


@torch.no_grad()
def gradient_norms(groups: Sequence[Iterable[Tensor]]) -> Tensor:  # (groups,) float32
    """Norms of each group's gradients over all shards, in one pass and one sum over ranks; 0 without gradients.

    All ranks that share weights call it, and none waits for the result.
    """
    gradients = [[p.grad for p in group if p.grad is not None] for group in groups]
    every = [gradient for group in gradients for gradient in group]
    if not every:
        return torch.zeros(len(groups))
    norms = iter(torch._foreach_norm([_few(local(gradient)) for gradient in every], dtype=torch.float32))
    zero, width = torch.zeros((), device=every[0].device), max(map(len, gradients))
    rows = [[*islice(norms, len(group)), *[zero] * (width - len(group))] for group in gradients]
    sums = torch.stack([norm for row in rows for norm in row]).view(len(groups), width).square().sum(1)
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


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor, or the whole of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _few(gradient: Tensor) -> Tensor:
    """The gradient, or fewer elements with the same norm.

    torch's norm on a CPU adds one element after the other in fp32: of 20 million it is 1e-3 too small, of shards less.
    Rows first is as fast and right to 1e-7. A GPU adds in blocks already.
    """
    by_rows = gradient.ndim > 1 and gradient.device.type == "cpu"
    return torch.linalg.vector_norm(gradient, dim=-1) if by_rows else gradient


def make_optimizer(
    model: nn.Module, optim: config.OptimConfig, device: torch.device, *, captured: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of a run; to be made after fully_shard, which replaces parameters.

    captured: its steps are replayed by a CUDA graph, so learning rates are on the device.
    """
    optimizer: torch.optim.Optimizer = _module(optim).make(model, optim, device)
    for group in optimizer.param_groups if captured else ():
        group.update(capturable=True, lr=torch.tensor(group["lr"], device=device))
    return optimizer


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All that its steps change or read: weights, state, learning rates on the device."""
    for group in optimizer.param_groups:
        yield from group["params"]
        if isinstance(group["lr"], Tensor):
            yield group["lr"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def set_learning_rate(optimizer: torch.optim.Optimizer, optim: config.OptimConfig, step: int, steps: int) -> float:
    """Write the settings of a step into the optimizer's groups; the learning rate of AdamW's."""
    factor = learning_rate(optim, step, steps)
    for group in optimizer.param_groups:
        settings = _module(optim).settings(optim, group["name"])
        lr = settings.pop("lr") * factor
        group.update(settings, lr=group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr)
    return optim.lr * factor


@torch.no_grad()
def clip(parameters: Iterable[Tensor], max_norm: float, norms: Tensor | None = None) -> Tensor:
    """Scale gradients in place to a norm of at most max_norm (0: leave them); the norm before, of all ranks' shards.

    norms: of all groups, where they are known. The host never waits for it. A norm that is infinite or NaN makes every
    gradient NaN or zero, as in torch.
    """
    parameters = list(parameters)
    norm = torch.linalg.vector_norm(gradient_norms([parameters]) if norms is None else norms)
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if max_norm > 0 and gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch computes it
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


def _module(optim: config.OptimConfig) -> Any:
    return import_module(OPTIMIZERS[optim.kind].module)
