"""The loop over chunks of tokens: logits, their gradient in place, and the two matmuls that consume it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fasttrain_kernels.linear import multiply
from fasttrain_kernels.linear_cross_entropy.rows import Options, rows_torch, rows_triton

# Rows of a chunk. A chunk re-reads and re-writes dweight, so it must be long enough for its matmuls to outweigh that:
# on an H100 about 1,200 rows, whatever H and V are. In bf16 the byte budget only binds for V beyond 163,840: Qwen3's
# 151,936 has chunks of full length.
_TRITON_ROWS = 4096
_TRITON_BYTES = 5 << 28
_ELEMENTS = 2**31  # of a chunk, below: what 32-bit indices of other people's kernels reach
# A CPU breaks even far earlier: 256 rows take 3% more time than 512, 384 rows 2%, with so much less memory.
_CPU_ROWS = 384
_CPU_BYTES = 80 << 20
_ROW_MULTIPLE = 128  # of a chunk, so that matmul tiles are full
# float16 holds nothing below 6e-8, and most gradients of logits are smaller than 1 / V. They are formed in units of the
# batch's largest coefficient, times this; what remains up to the largest float16, a factor of 64, is for z-loss.
_FLOAT16_GAIN = 1024.0


class Swept(NamedTuple):
    """Per-token results, and gradients to be multiplied by `unit`; empty where they were not asked for."""

    rows: tuple[Tensor, ...]  # (M,) each: loss, and with statistics lse, entropy, correct
    dhidden: Tensor  # (M, H) float32
    dweight: Tensor  # (V, H) of dweight_dtype()
    unit: Tensor  # () float32


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of losses, gradients in flight, and all arithmetic of the CPU form."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sweep(
    hidden: Tensor,  # (M, H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (M,)
    options: Options,
    *,
    use_triton: bool,
    coef: Tensor | None = None,  # (M,) factor of each token's gradient; zero where the target is ignored
    need_dhidden: bool = False,
    need_dweight: bool = False,
    stats: bool = False,
) -> Swept:
    """Loss of every token and, if needed, the gradients of sum(coef * loss)."""
    M, H = hidden.shape
    V = weight.shape[0]
    wide = wide_dtype(hidden.dtype)
    summed = dweight_dtype(hidden, weight, use_triton)
    compute = hidden.dtype if use_triton else wide
    hidden, weight, target = hidden.to(compute), weight.to(compute), target.contiguous()
    if not (need_dhidden or need_dweight):
        coef = None
    unit = torch.ones((), dtype=wide, device=hidden.device)
    if coef is not None and compute == torch.float16:
        coef, unit = _in_units_of_the_largest(coef)

    dhidden = torch.empty(M if need_dhidden else 0, H, dtype=wide, device=hidden.device)
    dweight = torch.empty(V if need_dweight else 0, H, dtype=summed, device=hidden.device)
    if M == 0:
        dweight.zero_()  # otherwise the first chunk writes it
    # In training the logits' memory takes their gradient, an operand of the next matmuls. Statistics keep them precise.
    logits_dtype = wide if stats else compute
    one_chunk = need_dweight and summed != wide
    chunk_rows = M if one_chunk else rows_per_chunk(M, V, logits_dtype.itemsize, use_triton)
    buffer = torch.empty(chunk_rows, triton.cdiv(V, 16) * 16, dtype=logits_dtype, device=hidden.device)
    results = []
    for chunk in _chunks(M, chunk_rows):
        h = hidden[chunk]
        padded = buffer[: h.shape[0]]
        logits = padded[:, :V]
        factor = coef[chunk] if coef is not None else None
        _matmul(h, weight.t(), out=logits)
        if use_triton:
            results.append(rows_triton(padded, V, target[chunk], factor, options, stats))
        else:
            results.append(rows_torch(padded, V, target[chunk], options, grad=factor is not None, stats=stats))
        if need_dhidden:
            _matmul(logits, weight, out=dhidden[chunk])
        if factor is not None and not use_triton:  # on the narrow side of the products: H columns instead of V
            h = h * factor.unsqueeze(1)
            if need_dhidden:
                dhidden[chunk].mul_(factor.unsqueeze(1))
        if need_dweight:
            _matmul(logits.t(), h, out=dweight, accumulate=chunk.start > 0)
    return Swept(_joined(results, wide, stats, hidden.device), dhidden, dweight, unit)


def dweight_dtype(hidden: Tensor, weight: Tensor, use_triton: bool) -> torch.dtype:
    """Wide where chunks are summed up; that of a bfloat16 weight where one chunk has all tokens.

    One chunk may be longer by H rows: their logits take the memory that the wider sum would have taken.
    """
    M, H = hidden.shape
    V = weight.shape[0]
    narrow = hidden.dtype == torch.bfloat16 and weight.dtype == hidden.dtype  # float16 could overflow before `unit`
    if not (use_triton and narrow):
        return wide_dtype(hidden.dtype)
    most = min(_most_rows(V, weight.dtype.itemsize, use_triton) + H, _ELEMENTS // (V + 16))
    return weight.dtype if most >= M else torch.float32


def rows_per_chunk(M: int, V: int, itemsize: int, use_triton: bool) -> int:
    """Equal chunks, each a multiple of _ROW_MULTIPLE and within the limits above; no longer than all tokens."""
    even = triton.cdiv(M, max(triton.cdiv(M, _most_rows(V, itemsize, use_triton)), 1))
    return min(triton.cdiv(even, _ROW_MULTIPLE) * _ROW_MULTIPLE, M)


def _most_rows(V: int, itemsize: int, use_triton: bool) -> int:
    most, budget = (_TRITON_ROWS, _TRITON_BYTES) if use_triton else (_CPU_ROWS, _CPU_BYTES)
    return max(min(most, budget // (V * itemsize)) // _ROW_MULTIPLE, 1) * _ROW_MULTIPLE


def _chunks(M: int, chunk_rows: int) -> Iterator[slice]:
    for start in range(0, M, max(chunk_rows, 1)):
        yield slice(start, min(start + chunk_rows, M))


def _in_units_of_the_largest(coef: Tensor) -> tuple[Tensor, Tensor]:
    largest = coef.abs().max() if coef.numel() else coef.new_zeros(())
    unit = torch.where(largest == 0, 1, largest) / _FLOAT16_GAIN
    return coef / unit, unit


def _matmul(a: Tensor, b: Tensor, *, out: Tensor, accumulate: bool = False) -> None:
    """out = a @ b or out += a @ b, summed and delivered in out's dtype, which may be wider than that of a and b."""
    if a.dtype == out.dtype:
        multiply(a, b, out, accumulate=accumulate)
    elif a.is_cuda:  # matrix units take 16-bit operands and deliver their float32 sums
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
