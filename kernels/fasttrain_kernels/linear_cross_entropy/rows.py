"""A chunk of logits becomes, row by row, loss and statistics, and in place its own gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttrain_kernels import native
from fasttrain_kernels._registration import warps

# Two passes want few wide programs per multiprocessor, so that the second one finds its rows in L2: one program of 32
# warps holds 13 MB of an H100's 50 MB at V = 50,304 and 40 MB at 151,936, two of 16 would hold twice as much. One pass
# has no such wish, and softcap and statistics would spill with 16 warps (sm_80 to sm_100).
_BLOCK_TWO_PASSES = 16384
_BLOCK = 4096
_VALUES_PER_LANE = 16  # two 128-bit accesses in bf16


class Options(NamedTuple):
    """What defines the loss of a token."""

    ignore_index: int
    z_loss: float
    label_smoothing: float
    softcap: float | None


@triton.jit
def _softcapped(x, cap):
    # tanh by exp loses the leading digits of small arguments, where its series is exact to float32.
    u = tl.abs(x) / cap
    u2 = u * u
    series = u * (1 - u2 * (1.0 / 3 - u2 * (2.0 / 15 - u2 * (17.0 / 315 - u2 * (62.0 / 2835)))))
    decay = tl.exp(-2 * u)
    tanh = tl.where(u < 0.25, series, (1 - decay) / (1 + decay))
    return cap * tl.where(x < 0, -tanh, tanh)


@triton.jit
def _cross_entropy_kernel(
    logits,  # (rows, V_PADDED): read, and with GRAD overwritten by its gradient
    target,
    coef,  # (rows,) float32: with GRAD, the factor of each row's gradient
    loss,
    lse_out,
    entropy,
    correct,
    V,
    V_PADDED,  # a multiple of 16, so that masks and rows are aligned to 128-bit accesses whatever V is
    ignore_index,
    z_loss,
    label_smoothing,
    softcap,
    SMOOTHED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    GRAD: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * V_PADDED
    label = tl.load(target + row)
    cols = tl.arange(0, BLOCK)

    if label == ignore_index:
        tl.store(loss + row, 0.0)
        if STATS:
            tl.store(lse_out + row, 0.0)
            tl.store(entropy + row, 0.0)
            tl.store(correct + row, 0)
        if GRAD:
            for start in range(0, V_PADDED, BLOCK):
                zero = tl.zeros((BLOCK,), logits.dtype.element_ty)
                tl.store(logits + start + cols, zero, mask=start + cols < V_PADDED)
    else:
        # A target outside the vocabulary cannot raise without a sync: its loss and gradient become NaN instead.
        valid = (label >= 0) & (label < V)
        poison = tl.where(valid, 0.0, float("nan"))
        picked = tl.load(logits + tl.where(valid, label, 0)).to(tl.float32)
        hot = tl.where(valid, label, -1).to(tl.int32)  # 32 bits, as the columns that are compared with it
        if SOFTCAPPED:
            picked = _softcapped(picked, softcap)

        # First pass, online: top = max y, total = sum exp(y - top), moment = sum exp(y - top) * (y - top).
        top = tl.full((), -3.0e38, tl.float32)  # finite, so that no difference of infinities can arise
        total = tl.zeros((), tl.float32)
        moment = tl.zeros((), tl.float32)
        plain_sum = tl.zeros((), tl.float32)
        best = tl.zeros((), tl.int32)
        for start in range(0, V_PADDED, BLOCK):
            inside = start + cols < V
            y = tl.load(logits + start + cols, mask=start + cols < V_PADDED, other=0.0).to(tl.float32)
            if SOFTCAPPED:
                y = _softcapped(y, softcap)
            if SMOOTHED:
                plain_sum += tl.sum(tl.where(inside, y, 0.0), axis=0)
            y = tl.where(inside, y, float("-inf"))
            block_top = tl.max(y, axis=0)
            new_top = tl.maximum(top, block_top)
            rescale = tl.exp(top - new_top)
            e = tl.exp(y - new_top)
            if STATS:
                first = tl.min(tl.where(y == block_top, start + cols, V), axis=0)
                best = tl.where(block_top > top, first, best)
                here = tl.sum(tl.where(e > 0, e * (y - new_top), 0.0), axis=0)
                moment = (moment + total * (top - new_top)) * rescale + here
            total = total * rescale + tl.sum(e, axis=0)
            top = new_top

        lse = top + tl.log(total)
        # Not lse - picked, which would round a small loss to ulps of a large lse.
        value = tl.log(total) + (top - picked) + z_loss * lse * lse
        if SMOOTHED:
            value += label_smoothing * (picked - plain_sum / V)
        tl.store(loss + row, value + poison)
        if STATS:
            tl.store(lse_out + row, lse)
            tl.store(entropy + row, tl.log(total) - moment / total)
            tl.store(correct + row, (best == hot).to(tl.int8))

        # Second pass. The target's gradient is formed in float32: p - 1 is rounded once, after the difference.
        if GRAD:
            c = tl.load(coef + row) + poison
            peak = c * (1 + 2 * z_loss * lse) / total
            floor = c * label_smoothing / V
            for start in range(0, V_PADDED, BLOCK):
                here = start + cols < V_PADDED
                y = tl.load(logits + start + cols, mask=here, other=0.0).to(tl.float32)
                slope = 1.0
                if SOFTCAPPED:
                    y = _softcapped(y, softcap)
                    slope = 1 - (y / softcap) * (y / softcap)
                dy = peak * tl.exp(y - top) - floor
                dy = tl.where(start + cols == hot, dy - c * (1 - label_smoothing), dy) * slope
                dy = tl.where(start + cols < V, dy, 0.0)
                tl.store(logits + start + cols, dy.to(logits.dtype.element_ty), mask=here)


def rows_triton(
    logits: Tensor,  # (rows, V padded to a multiple of 16), contiguous
    V: int,
    target: Tensor,  # (rows,)
    coef: Tensor | None,  # (rows,) float32; given, logits become their gradient
    options: Options,
    stats: bool,
) -> tuple[Tensor, ...]:
    """(loss,) or (loss, lse, entropy, correct) of each row, zero where the target is ignored. One program per row."""
    rows = logits.shape[0]
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse, entropy = (torch.empty_like(loss), torch.empty_like(loss)) if stats else (loss, loss)  # loss: not touched
    correct = torch.empty(rows if stats else 0, dtype=torch.int8, device=logits.device)
    block = _BLOCK_TWO_PASSES if coef is not None and options.softcap is None else _BLOCK
    block = min(block, triton.next_power_of_2(logits.shape[1]))
    _cross_entropy_kernel[(rows,)](
        *(logits, target, coef, loss, lse, entropy, correct),
        *(V, logits.shape[1], options.ignore_index),
        *(options.z_loss, options.label_smoothing, options.softcap or 0.0),
        SMOOTHED=options.label_smoothing != 0,
        SOFTCAPPED=options.softcap is not None,
        GRAD=coef is not None,
        STATS=stats,
        BLOCK=block,
        num_warps=warps(block // _VALUES_PER_LANE, logits.device),
    )
    return (loss, lse, entropy, correct.view(torch.bool)) if stats else (loss,)


def _softmax_(y: Tensor) -> tuple[Tensor, Tensor]:  # (rows, V) -> (rows,), (rows,)
    """Softmax in place; the greatest y of a row, and the logarithm of the sum of exp(y - greatest)."""
    if y.dtype == torch.float32 and not native.missing():
        top, total = native.softmax_rows(y)
        return top, total.log()
    top = y.amax(1)
    torch.softmax(y, 1, out=y)  # one call takes 0.6 of the time of sub, exp, sum and mul
    return top, -y.amax(1).log()  # the largest share is one over the sum


def rows_torch(
    logits: Tensor,  # (rows, V padded); destroyed
    V: int,
    target: Tensor,  # (rows,)
    options: Options,
    *,
    grad: bool,  # logits become their gradient
    stats: bool,
) -> tuple[Tensor, ...]:
    """The same in place with torch's own passes. The gradient is that of the loss itself: without factors of rows."""
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
