"""The CPU implementation: cpp/rope.cpp, and torch for what that does not do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttrain_kernels import cpp
from fasttrain_kernels._checks import empty_like_contiguous, wide
from fasttrain_kernels.cpp import streaming
from fasttrain_kernels.ops.qk_norm_rope.launch import last_contiguous
from fasttrain_kernels.ops.qk_norm_rope.reference import qk_norm_rope_reference, rotate, table_rows


def forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None, eps: float, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_positions_in_table(positions, cos.shape[0])
    if interleaved or not streaming.handles(q, k, q_weight, k_weight, cos, sin):
        q_out, k_out = qk_norm_rope_reference(
            q, k, q_weight, k_weight, cos, sin, positions=positions, eps=eps, interleaved=interleaved
        )
        return q_out.contiguous(), k_out.contiguous()
    outs = empty_like_contiguous(q), empty_like_contiguous(k)
    for x, weight, out in zip((q, k), (q_weight, k_weight), outs, strict=True):
        streaming.qk_norm_rope_forward(last_contiguous(x), weight, cos, sin, positions, out, eps=eps)
    return outs


def _check_positions_in_table(positions: Tensor | None, S: int) -> None:
    if positions is None:
        return
    if positions.device.type == "cpu" and not cpp.missing() and streaming.first_outside(positions, S) is None:
        return
    outside = (positions < 0) | (positions >= S)
    if outside.any():
        index = tuple(outside.nonzero()[0].tolist())
        raise ValueError(
            f"qk_norm_rope: positions{list(index)} is {positions[index].item()}, outside of the {S} rows of cos and "
            "sin; make the tables longer or check the positions"
        )


def backward(
    dq_out: Tensor | None, dk_out: Tensor | None, q: Tensor | None, k: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    eps: float, interleaved: bool, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dq_weight = _gradient_of(dq_out, q, q_weight, cos, sin, positions, eps, interleaved, wanted[0], wanted[2])
    dk, dk_weight = _gradient_of(dk_out, k, k_weight, cos, sin, positions, eps, interleaved, wanted[1], wanted[3])
    return dq, dk, dq_weight, dk_weight


def _gradient_of(
    dout: Tensor | None, x: Tensor | None, weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None, eps: float, interleaved: bool, want_dx: bool, want_dweight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx, dweight = cos.new_empty(0), cos.new_empty(0)
    if dout is None or not (want_dx or want_dweight):
        return dx, dweight
    if not interleaved and streaming.handles(dout, x, weight, cos, sin):
        dx = empty_like_contiguous(dout) if want_dx else dx
        dweight = torch.empty_like(weight) if want_dweight and weight is not None else dweight
        wanted = (dx if want_dx else None, dweight if want_dweight and weight is not None else None)
        dout, x = last_contiguous(dout), None if x is None else last_contiguous(x)
        streaming.qk_norm_rope_backward(dout, x, weight, cos, sin, positions, *wanted, eps=eps)
        return dx, dweight
    cos, sin = table_rows(cos, positions, dout.shape[1]), table_rows(sin, positions, dout.shape[1])
    g = rotate(wide(dout), cos, -sin, interleaved)
    if weight is None:
        return g.to(dout.dtype).contiguous(), dweight
    assert x is not None
    rstd = torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
    xhat = wide(x) * rstd
    if want_dweight:
        dweight = (g * xhat).sum(dim=(0, 1, 2)).to(weight.dtype)
    if want_dx:
        g = g * wide(weight)
        dx = (rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype).contiguous()
    return dx, dweight
