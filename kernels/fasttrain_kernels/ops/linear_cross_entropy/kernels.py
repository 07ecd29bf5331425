"""The Triton kernel: a chunk of logits becomes loss, lse and entropy row by row, and in place its own gradient."""

from __future__ import annotations

from fasttrain_kernels._triton import tl, triton


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
    logits,  # (rows, padded_vocab): read, and with GRAD overwritten by its gradient
    target,
    coef,  # (rows,) float32: with GRAD, the factor of each row's gradient
    loss,
    lse_out,
    entropy,
    correct,
    vocab,
    padded_vocab,  # a multiple of 16, so that masks and rows are aligned to 128-bit accesses whatever vocab is
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
    logits += row.to(tl.int64) * padded_vocab
    label = tl.load(target + row)
    cols = tl.arange(0, BLOCK)

    if label == ignore_index:
        tl.store(loss + row, 0.0)
        if STATS:
            tl.store(lse_out + row, 0.0)
            tl.store(entropy + row, 0.0)
            tl.store(correct + row, 0)
        if GRAD:
            for start in range(0, padded_vocab, BLOCK):
                zero = tl.zeros((BLOCK,), logits.dtype.element_ty)
                tl.store(logits + start + cols, zero, mask=start + cols < padded_vocab)
    else:
        # A target outside the vocabulary cannot raise without a sync: its loss and gradient become NaN instead.
        valid = (label >= 0) & (label < vocab)
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
        for start in range(0, padded_vocab, BLOCK):
            inside = start + cols < vocab
            y = tl.load(logits + start + cols, mask=start + cols < padded_vocab, other=0.0).to(tl.float32)
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
                first = tl.min(tl.where(y == block_top, start + cols, vocab), axis=0)
                best = tl.where(block_top > top, first, best)
                here = tl.sum(tl.where(e > 0, e * (y - new_top), 0.0), axis=0)
                moment = (moment + total * (top - new_top)) * rescale + here
            total = total * rescale + tl.sum(e, axis=0)
            top = new_top

        lse = top + tl.log(total)
        # Not lse - picked, which would round a small loss to ulps of a large lse.
        value = tl.log(total) + (top - picked) + z_loss * lse * lse
        if SMOOTHED:
            value += label_smoothing * (picked - plain_sum / vocab)
        tl.store(loss + row, value + poison)
        if STATS:
            tl.store(lse_out + row, lse)
            tl.store(entropy + row, tl.log(total) - moment / total)
            tl.store(correct + row, (best == hot).to(tl.int8))

        # Second pass. The target's gradient is formed in float32: p - 1 is rounded once, after the difference.
        if GRAD:
            c = tl.load(coef + row) + poison
            peak = c * (1 + 2 * z_loss * lse) / total
            floor = c * label_smoothing / vocab
            for start in range(0, padded_vocab, BLOCK):
                here = start + cols < padded_vocab
                y = tl.load(logits + start + cols, mask=here, other=0.0).to(tl.float32)
                slope = 1.0
                if SOFTCAPPED:
                    y = _softcapped(y, softcap)
                    slope = 1 - (y / softcap) * (y / softcap)
                dy = peak * tl.exp(y - top) - floor
                dy = tl.where(start + cols == hot, dy - c * (1 - label_smoothing), dy) * slope
                dy = tl.where(start + cols < vocab, dy, 0.0)
                tl.store(logits + start + cols, dy.to(logits.dtype.element_ty), mask=here)
