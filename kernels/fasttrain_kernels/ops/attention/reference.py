"""The specification of attention: dense, with an explicit mask, differentiable by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain_kernels._checks import wide


def attention_reference(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,  # (num_docs + 1,)
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:  # (B, T_q, H, D)
    """Softmax attention in float32 (float64 where the inputs are), rounded once. Holds all T_q x T_k scores."""
    B, T, H, D = q.shape
    if cu_seqlens is not None:  # documents lie in one stream of tokens
        q, k, v = (x.reshape(1, B * T, x.shape[2], D) for x in (q, k, v))
    groups = H // k.shape[2]
    query, key, value = (wide(x).transpose(1, 2) for x in (q, k, v))
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_keys(q.shape[1], k.shape[1], causal, window, cu_seqlens, q.device)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    weights = weights.where(visible.any(-1, keepdim=True), 0.0)  # a query that sees nothing gets zeros
    return (weights @ value).transpose(1, 2).reshape(B, T, H, D).to(q.dtype)


def visible_keys(
    num_queries: int,
    num_keys: int,
    causal: bool,
    window: int | None,
    cu_seqlens: Tensor | None,  # (num_docs + 1,)
    device: torch.device,
) -> Tensor:  # (num_queries, num_keys) bool
    """The mask, element by element. With fewer queries than keys, the queries are the last ones."""
    j = torch.arange(num_keys, device=device)
    i = torch.arange(num_queries, device=device)[:, None] + (num_keys - num_queries)
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if causal:
        visible &= j <= i
    if window is not None:
        visible &= (i - j).abs() < window
    if cu_seqlens is not None:
        document = (j[:, None] >= cu_seqlens[None, 1:]).sum(-1)
        visible &= document[:, None] == document
    return visible
