"""The interval of keys that a query sees, whatever the mask.

Query i of T_q stands at position i + shift among the T_k keys, shift = T_k - T_q. It sees the keys

    [lo(i), hi(i)) = [max(start, i + shift - back), min(end, i + shift + ahead + 1))

where [start, end) is its document (all keys without documents), and back and ahead say how far the mask reaches: 0
ahead when causal, window - 1 with a window, NO_LIMIT otherwise. With the roles exchanged (shift negated, back and
ahead swapped) the same formula gives the queries that see a key.

Neither end ever decreases from one query to the next, so that a tile of queries needs the keys [lo(first),
hi(last)), and no mask at all within [lo(last), hi(first)): documents and windows cost block ranges, not a
comparison per element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain_kernels._launch import launch
from fasttrain_kernels._registration import call, register
from fasttrain_kernels._triton import tl, triton

NO_LIMIT = -1


def reach(causal: bool, window: int | None) -> tuple[int, int]:
    """The number of keys that a query sees before and after its own position, as flash-attn's window_size."""
    back = NO_LIMIT if window is None else window - 1
    return back, 0 if causal else back


def check_cu_seqlens(cu_seqlens: Tensor) -> None:
    """Raise unless it can be one, whatever its values."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        raise TypeError(
            "attention: cu_seqlens must be a 1-D tensor of dtype torch.int32: 0 and the end of each document"
        )
    if cu_seqlens.shape[0] < 2:
        raise ValueError("attention: cu_seqlens needs at least two values, 0 and the number of tokens")


def check_documents(
    cu_seqlens: Tensor,  # (num_docs + 1,)
    num_tokens: int,
) -> None:
    """Raise unless cu_seqlens rises from 0 to num_tokens. On the CPU reading it waits for no device."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != num_tokens or ends != sorted(ends):
        raise ValueError(
            f"attention: cu_seqlens must rise from 0 to the {num_tokens} tokens of the batch, got {_abbreviated(ends)}"
        )


def _abbreviated(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"{str(values[:4])[:-1]}, ..., {str(values[-3:])[1:]}"


@triton.jit(do_not_specialize=["num_docs", "num_tokens", "steps"])
def _document_bounds_kernel(cu_seqlens, bounds, num_docs, num_tokens, steps, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = token * 0
    high = low + num_docs
    for _ in range(0, steps):  # bisection: cu_seqlens[low] <= token < cu_seqlens[high]
        middle = (low + high) // 2
        begun = tl.load(cu_seqlens + middle) <= token
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    # Clamped, so that wrong values cannot lead a kernel outside its tensors.
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + low), 0), num_tokens)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + low + 1), 0), num_tokens)
    tl.store(bounds + token, start, mask=token < num_tokens)
    tl.store(bounds + num_tokens + token, end, mask=token < num_tokens)


def document_bounds(
    cu_seqlens: Tensor,  # (num_docs + 1,) int32
    num_tokens: int,
) -> Tensor:  # (2, num_tokens) int32
    """Start and end of each token's document, for attention(documents=...): once for all layers.

    On a GPU cu_seqlens is not read back, and so not checked: bounds outside of the tokens are clamped.
    """
    check_cu_seqlens(cu_seqlens)
    return call(_document_bounds, cu_seqlens, num_tokens)


def _bounds_triton(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    if cu_seqlens.device.type == "cpu":
        check_documents(cu_seqlens, num_tokens)
    bounds = _empty_bounds(cu_seqlens, num_tokens)
    if num_tokens:
        num_docs = cu_seqlens.shape[0] - 1
        block, steps = 256, (num_docs - 1).bit_length()
        launch(
            _document_bounds_kernel,
            (triton.cdiv(num_tokens, block),),
            cu_seqlens.contiguous(),
            bounds,
            num_docs,
            num_tokens,
            steps,
            BLOCK=block,
            num_warps=4,
        )
    return bounds


def _bounds_cpu(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    ends = cu_seqlens.cpu()  # from MPS
    check_documents(ends, num_tokens)
    token = torch.arange(num_tokens, dtype=torch.int32)
    document = torch.searchsorted(ends, token, right=True).sub_(1).clamp_(0, len(ends) - 2)
    return torch.stack((ends[document], ends[document + 1])).to(cu_seqlens.device)


def _empty_bounds(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    return torch.empty(2, num_tokens, dtype=torch.int32, device=cu_seqlens.device)


_document_bounds = register(
    "document_bounds(Tensor cu_seqlens, SymInt num_tokens) -> Tensor",
    triton=_bounds_triton,
    cpu=_bounds_cpu,
    fake=_empty_bounds,
)


def key_intervals(
    num_queries: int,
    num_keys: int,
    causal: bool,
    window: int | None,
    documents: Tensor | None,  # (2, num_keys)
) -> tuple[Tensor, Tensor]:  # (num_queries,), (num_queries,)
    """lo and hi of every query, for the CPU implementations."""
    back, ahead = reach(causal, window)
    position = torch.arange(num_queries, dtype=torch.int64) + (num_keys - num_queries)
    lo, hi = torch.zeros_like(position), torch.full_like(position, num_keys)
    if documents is not None:
        lo, hi = documents.cpu().long()  # from MPS
    if back != NO_LIMIT:
        lo = torch.maximum(lo, position - back)
    if ahead != NO_LIMIT:
        hi = torch.minimum(hi, position + ahead + 1)
    return lo, hi


@triton.jit
def interval(index, shift, length, documents, BACK: tl.constexpr, AHEAD: tl.constexpr):
    """lo and hi of one query or of a tile of them. Indices past the end get an unused interval."""
    lo = index * 0
    hi = lo + length
    if documents is not None:  # start and end per token; queries and keys are the same stream
        lo = tl.load(documents + index, mask=index < length, other=0)
        hi = tl.load(documents + length + index, mask=index < length, other=0)
    if BACK >= 0:
        lo = tl.maximum(lo, index + shift - BACK)
    if AHEAD >= 0:
        hi = tl.minimum(hi, index + shift + AHEAD + 1)
    return lo, hi


@triton.jit
def block_ranges(first, last, shift, length, documents, BACK: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of the other side that the tile [first, last] needs, counted from its lowest lo.

    Returns where block 0 begins, the mask-free blocks as [full, full_end), and the number of blocks.
    """
    begin, hi_first = interval(first, shift, length, documents, BACK, AHEAD)
    lo_last, end = interval(last, shift, length, documents, BACK, AHEAD)
    num_blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
    full = tl.minimum(tl.cdiv(tl.maximum(lo_last - begin, 0), BLOCK), num_blocks)
    full_end = tl.minimum(tl.maximum(tl.maximum(hi_first - begin, 0) // BLOCK, full), num_blocks)
    return begin, full, full_end, num_blocks


@triton.jit
def edge_block(i, full, full_end):
    """The i-th block that needs a mask: those before the mask-free ones, then those after, in one loop."""
    return tl.where(i < full, i, i + full_end - full)
