"""AdamW, torch's, in one pass over weights, gradients and moments.

torch's step looks every tensor up anew, which takes the host longer than what it launches. Ours remembers them.

Weights of two or more dimensions decay, embedding and head among them; norms and biases do not. (A tied embedding is
the head as well, and decay is what bounds its logits.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttrain.config import OptimConfig
from fasttrain.optim.optimizer import local


def make(model: nn.Module, optim: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    return AdamW(groups(model.parameters(), optim), fused=is_fused(device))


class AdamW(torch.optim.AdamW):
    """torch's, to the bit; state, hooks and checkpoints are its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known: dict[int, _Group] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if not self.defaults["fused"]:
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        scale, not_finite = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for number, group in enumerate(self.param_groups):
            gradients, known = self._tensors(number, group)
            if not gradients:
                continue
            torch._foreach_add_(known.steps, 1)
            torch._fused_adamw_(
                known.weights, gradients, known.means, known.squares, [], known.steps,
                lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
                weight_decay=group["weight_decay"], amsgrad=False, maximize=False,
                grad_scale=scale, found_inf=not_finite,
            )  # fmt: skip
            if not_finite is not None:  # then this was no step
                torch._foreach_sub_(known.steps, [not_finite] * len(known.steps))
        return loss

    def _tensors(self, number: int, group: dict[str, Any]) -> tuple[list[Tensor], _Group]:
        """This rank's shards of gradients, and of what they change."""
        params, known = group["params"], self._known.get(number)
        gradients = [p.grad for p in params if p.grad is not None]
        is_whole = len(gradients) == len(params)
        if known is None or not is_whole or self.state[params[0]].get("exp_avg") is not known.first:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)  # torch's: makes state that is missing
            weights, _, means, squares, _, steps = ([*map(local, x)] for x in lists)
            known = _Group(lists[2][0] if means else None, weights, means, squares, steps)
            self._known.pop(number, None)
            if is_whole:
                self._known[number] = known
        return [local(gradient) for gradient in gradients], known


class _Group(NamedTuple):
    first: Tensor | None  # moment, by which one sees that a checkpoint has been loaded
    weights: list[Tensor]  # and of each
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


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
