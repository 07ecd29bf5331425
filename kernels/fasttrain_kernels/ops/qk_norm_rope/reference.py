"""The specification of qk_norm_rope in plain torch, and the tables of its angles."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain_kernels._checks import wide


def rotary_table(
    num_positions: int,
    rotary_dim: int,  # R
    *,
    theta: float = 10000.0,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:  # cos, sin: (S, R/2)
    """cos and sin of position * theta^(-2i/R) in float32, computed in the order in which Transformers does."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_table: rotary_dim ({rotary_dim}) must be even and at least 2")
    pair = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    frequency = 1.0 / theta ** (pair / rotary_dim)
    angle = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def qk_norm_rope_reference(
    q: Tensor,  # (B, T, Hq, D)
    k: Tensor,  # (B, T, Hk, D)
    q_weight: Tensor | None,  # (D,)
    k_weight: Tensor | None,  # (D,)
    cos: Tensor,  # (S, R/2)
    sin: Tensor,  # (S, R/2)
    *,
    positions: Tensor | None = None,  # (B, T) or (T,)
    eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # (B, T, Hq, D), (B, T, Hk, D)
    """The specification: float32 inside, xhat and xhat * weight rounded as Qwen3 does, the rotation rounded once."""
    cos, sin = table_rows(cos, positions, q.shape[1]), table_rows(sin, positions, q.shape[1])
    q_out = rotate(normalise(q, q_weight, eps), cos, sin, interleaved).to(q.dtype)
    k_out = rotate(normalise(k, k_weight, eps), cos, sin, interleaved).to(k.dtype)
    return q_out, k_out


def table_rows(table: Tensor, positions: Tensor | None, T: int) -> Tensor:  # -> (T, 1, R/2) or (B, T, 1, R/2)
    return wide(table[:T] if positions is None else table[positions])[..., None, :]


def normalise(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return wide(x)
    xhat = wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
    return wide((wide(xhat.to(x.dtype)) * wide(weight)).to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    R = 2 * cos.shape[-1]
    rotary, rest = x[..., :R], x[..., R:]
    if interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = rotary.chunk(2, dim=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return rotated if x.shape[-1] == R else torch.cat((rotated, rest), dim=-1)
