"""The CPU implementation of the kernel: torch ops, and the softmax of cpp/softmax.cpp where there is a compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain_kernels import cpp
from fasttrain_kernels.ops.linear_cross_entropy.reference import LossOptions


def _softmax_(y: Tensor) -> tuple[Tensor, Tensor]:  # (rows, V) -> (rows,), (rows,)
    """Softmax in place; returns the maximum of each row, and the log of the sum of exp(y - maximum)."""
    if y.device.type == "cpu" and y.dtype == torch.float32 and not cpp.missing():
        top, total = cpp.softmax_rows(y)
        return top, total.log()
    top = y.amax(1)
    torch.softmax(y, 1, out=y)  # one call takes 0.6 of the time of sub, exp, sum and mul
    return top, -y.amax(1).log()  # the largest share is one over the sum


def cross_entropy_cpu(
    logits: Tensor,  # (rows, V padded); destroyed
    V: int,
    target: Tensor,  # (rows,)
    options: LossOptions,
    *,
    grad: bool,  # logits become their gradient
    stats: bool,
) -> tuple[Tensor, ...]:
    """The kernel's results in torch ops, in place. Gradients are of the unweighted loss: no factor per token."""
    y = logits[:, :V]
    ignored = target == options.ignore_index
    index = target.long().masked_fill(ignored, 0).unsqueeze(1)
    slope = None
    if options.softcap is not None:
        y.div_(options.softcap).tanh_()
        slope = torch.square(y).neg_().add_(1) if grad else None
        y.mul_(options.softcap)

    picked = y.gather(1, index).squeeze(1)
    mean = y.mean(1) if options.label_smoothing else picked
    best = y.argmax(1) if stats else None
    below = y - y.amax(1, keepdim=True) if stats else None
    top, log_total = _softmax_(y)
    p, lse = y, top + log_total
    loss = log_total + (top - picked) + options.label_smoothing * (picked - mean) + options.z_loss * lse.square()

    entropy = log_total - (p * below).sum(1) if below is not None else None
    if grad:
        if options.z_loss:
            p.mul_((1 + 2 * options.z_loss * lse).unsqueeze(1))
        if options.label_smoothing:
            p.sub_(options.label_smoothing / V)
        p.scatter_add_(1, index, torch.full_like(picked, options.label_smoothing - 1).unsqueeze(1))
        if slope is not None:
            p.mul_(slope)
        p.index_fill_(0, ignored.nonzero().squeeze(1), 0)  # exactly zero even where an ignored row is not finite
    loss.masked_fill_(ignored, 0)
    if best is None or entropy is None:
        return (loss,)
    correct = (best == index.squeeze(1)) & ~ignored
    return loss, lse.masked_fill_(ignored, 0), entropy.masked_fill_(ignored, 0), correct
