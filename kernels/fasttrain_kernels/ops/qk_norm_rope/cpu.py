"""The CPU implementation, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttrain_kernels._checks import wide
from fasttrain_kernels.ops.qk_norm_rope.reference import qk_norm_rope_reference, rotate, table_rows


def forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None, eps: float, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_positions_in_table(positions, cos.shape[0])
    q_out, k_out = qk_norm_rope_reference(
        q, k, q_weight, k_weight, cos, sin, positions=positions, eps=eps, interleaved=interleaved
    )
    return q_out.contiguous(), k_out.contiguous()


def _check_positions_in_table(positions: Tensor | None, S: int) -> None:
    if positions is None:
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
