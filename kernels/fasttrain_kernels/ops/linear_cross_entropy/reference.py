"""Linear cross entropy as its definition reads, in float32, with all logits in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasttrain_kernels._checks import wide


class LossOptions(NamedTuple):
    """The options that define the loss of a token."""

    ignore_index: int
    z_loss: float
    label_smoothing: float
    softcap: float | None


class TokenStats(NamedTuple):
    """Per-token results for evaluation. All zero (and not correct) where the target is ignore_index."""

    loss: Tensor  # (...) the loss that linear_cross_entropy averages
    lse: Tensor  # (...) log of the softmax's denominator
    entropy: Tensor  # (...) of the predicted distribution, in nats
    correct: Tensor  # (...) bool: the target has the largest logit (the lowest index among equals)


def linear_cross_entropy_reference(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (...)
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    token_weight: Tensor | None = None,  # (...)
    reduction: str = "mean",
) -> Tensor:  # () or, with reduction="none", (...)
    """The specification."""
    logits = torch.nn.functional.linear(wide(hidden), wide(weight))
    return loss_of_logits(
        logits,
        target,
        ignore_index=ignore_index,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        softcap=softcap,
        token_weight=token_weight,
        reduction=reduction,
    )


def loss_of_logits(
    logits: Tensor,  # (..., V)
    target: Tensor,  # (...)
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The loss after the matmul; tests put it behind a matmul of lower precision."""
    logits = _softcapped(logits, softcap)
    loss = _token_loss(logits, target, ignore_index, z_loss, label_smoothing)
    counted = (target != ignore_index).to(loss.dtype)
    if token_weight is not None:
        counted = torch.where(target != ignore_index, token_weight.to(loss.dtype), 0)
    loss = loss * counted
    if reduction == "none":
        return loss
    return loss.sum() / counted.sum() if reduction == "mean" else loss.sum()


def linear_cross_entropy_stats_reference(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (...)
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> TokenStats:
    """The specification of linear_cross_entropy_stats."""
    logits = _softcapped(torch.nn.functional.linear(wide(hidden), wide(weight)), softcap)
    counted = target != ignore_index
    return TokenStats(
        loss=_token_loss(logits, target, ignore_index, z_loss, label_smoothing),
        lse=torch.where(counted, logits.logsumexp(-1), 0),
        entropy=torch.where(counted, torch.distributions.Categorical(logits=logits).entropy(), 0),
        correct=counted & (logits.argmax(-1) == target),
    )


def _softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _token_loss(logits: Tensor, target: Tensor, ignore_index: int, z_loss: float, label_smoothing: float) -> Tensor:
    counted = target != ignore_index
    index = torch.where(counted, target, 0).long().unsqueeze(-1)
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, index).squeeze(-1)
    loss = lse - (1 - label_smoothing) * picked - label_smoothing * logits.mean(-1) + z_loss * lse.square()
    return torch.where(counted, loss, 0)
