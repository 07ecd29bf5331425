"""Tiles, grids and launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels._checks import empty_like_contiguous
from fasttrain_kernels._launch import launch, remembered
from fasttrain_kernels._registration import multiprocessor_count, warps
from fasttrain_kernels._triton import triton
from fasttrain_kernels.ops.qk_norm_rope.kernels import (
    _qk_norm_rope_bwd_kernel,
    _qk_norm_rope_fwd_kernel,
    _sum_partials_kernel,
)

_THREADS = 128
# Elements of x in a tile. Forward: four 128-bit loads of bf16 in flight per lane. Backward holds x, dout and the sums
# of dw for q and k in registers, so half of that.
_FORWARD_TILE = 4096
_BACKWARD_TILE = 2048
_BACKWARD_PROGRAMS_PER_SM = 3  # 168 registers x 128 threads x 3 fill a register file: one wave of programs
_MAX_HEADS = 8


@remembered
def _layout(Hq: int, Hk: int, D: int, R: int, interleaved: bool, tile: int) -> dict[str, Any]:
    """The split of heads into tiles: TOKENS x HEADS heads, each of HALF pairs (padded)."""
    half = triton.next_power_of_2(triton.cdiv(D, 2))
    rows = max(1, tile // (2 * half))
    # q and k share one HEADS, so that cos and sin are laid out over lanes once. The largest that pads few lanes.
    heads = min(_MAX_HEADS, rows)
    while heads > 1 and 4 * heads * (triton.cdiv(Hq, heads) + triton.cdiv(Hk, heads)) > 5 * (Hq + Hk):
        heads //= 2
    return dict(HQ=Hq, HK=Hk, D=D, R=R, TOKENS=rows // heads, HEADS=heads, HALF=half, INTERLEAVED=interleaved)


def last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, ...]:  # of batch, tokens and heads
    if x is None:
        return 0, 0, 0
    # The stride of a dimension of size 1 means nothing and may be odd, which would forbid 128-bit accesses.
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))


def _position_strides(positions: Tensor | None) -> tuple[int, int]:
    if positions is None:
        return 0, 0
    return (0 if positions.dim() == 1 else positions.stride(0)), positions.stride(-1)


def forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None, eps: float, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_out, k_out = empty_like_contiguous(q), empty_like_contiguous(k)
    (B, T, Hq, D), Hk = q.shape, k.shape[2]
    if q.numel() + k.numel() == 0:
        return q_out, k_out
    q, k, cos, sin = map(last_contiguous, (q, k, cos, sin))
    layout = _layout(Hq, Hk, D, 2 * cos.shape[1], interleaved, _FORWARD_TILE)
    launch(
        _qk_norm_rope_fwd_kernel,
        (triton.cdiv(B * T, layout["TOKENS"]),),
        *(q, k, _contiguous(q_weight), _contiguous(k_weight), cos, sin, positions, q_out, k_out),
        *(*_strides(q), *_strides(k), cos.stride(0), sin.stride(0), *_position_strides(positions)),
        *(T, B * T, cos.shape[0]),
        **layout,
        EPS=eps,
        POSITIONS=positions is not None,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        num_warps=warps(_THREADS, cos.device),
    )
    return q_out, k_out


def backward(
    dq_out: Tensor | None, dk_out: Tensor | None, q: Tensor | None, k: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    eps: float, interleaved: bool, wanted: Sequence[bool],  # gradients of q, k, q_weight, k_weight
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grads = empty_grads(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, positions, eps, interleaved, wanted)
    like = dq_out if dq_out is not None else dk_out
    if like is None:
        return grads
    B, T, _, D = like.shape
    Hq, Hk = (0 if dout is None else dout.shape[2] for dout in (dq_out, dk_out))
    if B * T * (Hq + Hk) == 0:
        for dweight in grads[2:]:
            dweight.zero_()
        return grads
    dq_out, dk_out, q, k = (None if x is None else last_contiguous(x) for x in (dq_out, dk_out, q, k))
    cos, sin = last_contiguous(cos), last_contiguous(sin)
    dq, dk, dq_weight, dk_weight = grads
    layout = _layout(Hq, Hk, D, 2 * cos.shape[1], interleaved, _BACKWARD_TILE)
    num_weights = wanted[2] + wanted[3]
    P = triton.cdiv(B * T, layout["TOKENS"])
    if num_weights:  # a persistent kernel keeps the partial sums few
        P = min(P, _BACKWARD_PROGRAMS_PER_SM * multiprocessor_count(cos.device))
    partials = torch.empty((num_weights, P, D), dtype=torch.float32, device=cos.device)
    launch(
        _qk_norm_rope_bwd_kernel,
        (P,),
        *(dq_out, dk_out, q, k, _contiguous(q_weight), _contiguous(k_weight), cos, sin, positions, dq, dk, partials),
        *(*_strides(dq_out), *_strides(dk_out), *_strides(q), *_strides(k)),
        *(cos.stride(0), sin.stride(0), *_position_strides(positions), T, B * T, cos.shape[0]),
        **layout,
        EPS=eps,
        POSITIONS=positions is not None,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        DQ=wanted[0],
        DK=wanted[1],
        DQ_WEIGHT=wanted[2],
        DK_WEIGHT=wanted[3],
        num_warps=warps(_THREADS, cos.device),
    )
    if num_weights:
        cols = min(32, triton.next_power_of_2(D))
        launch(
            _sum_partials_kernel,
            (triton.cdiv(D, cols),),
            *(partials, dq_weight, dk_weight, P),
            D=D,
            ROWS=128,
            COLS=cols,
            DQ_WEIGHT=wanted[2],
            DK_WEIGHT=wanted[3],
            num_warps=warps(_THREADS, cos.device),
        )
    return grads


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def empty_grads(
    dq_out: Tensor | None, dk_out: Tensor | None, q: Tensor | None, k: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    eps: float, interleaved: bool, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = (dq_out, dk_out, q_weight, k_weight)
    dq, dk, dq_weight, dk_weight = (
        empty_like_contiguous(x) if want and x is not None else cos.new_empty(0)
        for x, want in zip(like, wanted, strict=True)
    )
    return dq, dk, dq_weight, dk_weight
