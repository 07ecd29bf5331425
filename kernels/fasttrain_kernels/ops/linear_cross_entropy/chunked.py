"""The chunked forward: logits of a chunk of tokens, their gradient in place, and the two matmuls that consume it."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from fasttrain_kernels._checks import wide_dtype
from fasttrain_kernels.ops.linear import matmul_out
from fasttrain_kernels.ops.linear_cross_entropy.chunks import loss_chunk
from fasttrain_kernels.ops.linear_cross_entropy.cpu import cross_entropy_cpu
from fasttrain_kernels.ops.linear_cross_entropy.launch import cross_entropy_triton
from fasttrain_kernels.ops.linear_cross_entropy.reference import LossOptions

# float16 holds nothing below 6e-8, and most gradients of logits are smaller than 1 / V. So they are divided by the
# batch's largest coefficient and multiplied by this; the rest up to the largest float16, a factor of 64, is for z-loss.
_FLOAT16_GAIN = 1024.0


class ChunkedForward(NamedTuple):
    """Per-token results, and gradients to be multiplied by `grad_scale`; empty where they were not asked for."""

    tokens: tuple[Tensor, ...]  # (M,) each: loss, and with stats lse, entropy, correct
    dhidden: Tensor  # (M, H) float32
    dweight: Tensor  # (V, H) of loss_chunk's dweight_dtype
    grad_scale: Tensor  # () float32


def chunked_forward(
    hidden: Tensor,  # (M, H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (M,)
    options: LossOptions,
    *,
    use_triton: bool,
    coef: Tensor | None = None,  # (M,) factor of each token's gradient; zero where the target is ignored
    need_dhidden: bool = False,
    need_dweight: bool = False,
    stats: bool = False,
) -> ChunkedForward:
    """Loss of every token and, if needed, the gradients of sum(coef * loss)."""
    M, H = hidden.shape
    V = weight.shape[0]
    wide = wide_dtype(hidden.dtype)
    split = loss_chunk(
        *(M, H, V),
        dtype=hidden.dtype,
        weight_dtype=weight.dtype,
        use_triton=use_triton,
        need_dweight=need_dweight,
        stats=stats,
    )
    compute = hidden.dtype if use_triton else wide
    hidden, weight, target = hidden.to(compute), weight.to(compute), target.contiguous()
    if not (need_dhidden or need_dweight):
        coef = None
    grad_scale = torch.ones((), dtype=wide, device=hidden.device)
    if coef is not None and compute == torch.float16:
        coef, grad_scale = _scaled_for_float16(coef)

    dhidden = torch.empty(M if need_dhidden else 0, H, dtype=wide, device=hidden.device)
    dweight = torch.empty(V if need_dweight else 0, H, dtype=getattr(torch, split.dweight_dtype), device=hidden.device)
    if M == 0:
        dweight.zero_()  # otherwise the first chunk writes it
    buffer = torch.empty(split.tokens, -(-V // 16) * 16, dtype=getattr(torch, split.logits_dtype), device=hidden.device)
    padded, logits, columns, results = buffer, buffer[:, :V], weight.t(), []
    # Split at once: slices for each chunk would take the host as long as the chunk's launches.
    parts = [x.split(split.tokens) if x is not None and x.shape[0] else () for x in (hidden, target, coef, dhidden)]
    for number, (h, labels, factor, dh) in enumerate(zip_longest(*parts)):
        if h.shape[0] < padded.shape[0]:  # the last one
            padded, logits = padded[: h.shape[0]], logits[: h.shape[0]]
        _matmul(h, columns, out=logits)
        if use_triton:
            results.append(cross_entropy_triton(padded, V, labels, factor, options, stats))
        else:
            results.append(cross_entropy_cpu(padded, V, labels, options, grad=factor is not None, stats=stats))
        if need_dhidden:
            _matmul(logits, weight, out=dh)
        if factor is not None and not use_triton:  # on the narrow side of the matmuls: H columns instead of V
            h = h * factor.unsqueeze(1)
            if need_dhidden:
                dh.mul_(factor.unsqueeze(1))
        if need_dweight:
            _matmul(logits.t(), h, out=dweight, accumulate=number > 0)
    return ChunkedForward(_joined(results, wide, stats, hidden.device), dhidden, dweight, grad_scale)


def _scaled_for_float16(coef: Tensor) -> tuple[Tensor, Tensor]:
    largest = coef.abs().max() if coef.numel() else coef.new_zeros(())
    grad_scale = torch.where(largest == 0, 1, largest) / _FLOAT16_GAIN
    return coef / grad_scale, grad_scale


def _matmul(a: Tensor, b: Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """out = a @ b or out += a @ b, summed and delivered in out's dtype, which may be wider than that of a and b."""
    if a.dtype == out.dtype:
        matmul_out(a, b, out, accumulate=accumulate)
    elif a.is_cuda:  # tensor cores take 16-bit operands and deliver their float32 sums
        if not accumulate:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
            return
        try:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        except RuntimeError:  # some releases want the accumulator in a.dtype, and refuse before they compute
            out.add_(torch.mm(a, b, out_dtype=out.dtype))
    else:
        _matmul(a.to(out.dtype), b.to(out.dtype), out=out, accumulate=accumulate)


def _joined(
    results: list[tuple[Tensor, ...]], wide: torch.dtype, stats: bool, device: torch.device
) -> tuple[Tensor, ...]:
    if not results:
        dtypes = (wide, wide, wide, torch.bool) if stats else (wide,)
        return tuple(torch.empty(0, dtype=dtype, device=device) for dtype in dtypes)
    return results[0] if len(results) == 1 else tuple(map(torch.cat, zip(*results, strict=True)))
