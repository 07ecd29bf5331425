"""The CPU implementation in C++ (cpp/attention.cpp): float32, all masks, no softcap."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain_kernels import cpp
from fasttrain_kernels.ops.attention.intervals import key_intervals
from fasttrain_kernels.ops.attention.layout import AttentionProblem, addressable, empty_lse


def forward(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    documents: Tensor | None,  # (2, B * T_k): intervals.document_bounds
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor]:  # (B, T_q, H, D), (2, H, B * T_q)
    """Return out and lse."""
    assert softcap is None
    problem = AttentionProblem.of(q, k, documents, causal, window, softcap, scale)
    out, lse = q.new_empty(q.shape), empty_lse(q)
    q, k, v = (problem.stream(addressable(x)) for x in (q, k, v))
    cpp.attention_forward(_args(problem, causal, window), q, k, v, out, lse)
    return out, lse


def backward(
    dout: Tensor,  # (B, T_q, H, D)
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    out: Tensor,  # (B, T_q, H, D)
    lse: Tensor,  # (2, H, B * T_q)
    documents: Tensor | None,  # (2, B * T_k): intervals.document_bounds
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # as q, k, v; empty where not needed
    """Return the gradients. They share most of their work: all are computed where one is needed."""
    problem = AttentionProblem.of(q, k, documents, causal, window, softcap, scale)
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dout, q, k, v = (problem.stream(addressable(x)) for x in (dout, q, k, v))
    cpp.attention_backward(_args(problem, causal, window), dout, q, k, v, lse, (dq, dk, dv))
    needed = zip((dq, dk, dv), (need_dq, need_dk, need_dv), strict=True)
    dq, dk, dv = (x if need else x.new_empty(0) for x, need in needed)
    return dq, dk, dv


def _args(problem: AttentionProblem, causal: bool, window: int | None) -> cpp.AttentionArgs:
    ends = key_intervals(problem.num_queries, problem.num_keys, causal, window, problem.documents)
    lo, hi = (end.clamp(0, problem.num_keys).contiguous() for end in ends)
    args = cpp.AttentionArgs(
        problem.batch, problem.num_queries, problem.num_keys, problem.num_heads, problem.num_kv_heads, problem.head_dim,
        problem.scale, lo.data_ptr(), hi.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    args.kept = (lo, hi)  # as long as their addresses
    return args
