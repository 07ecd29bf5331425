"""The CPU form in C++ (native/attention.cpp): float32, all masks, no softcap."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain_kernels import native
from fasttrain_kernels.attention.intervals import key_intervals
from fasttrain_kernels.attention.layout import Problem, addressable, empty_statistics


def forward(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    cu_seqlens: Tensor | None,  # (num_docs + 1,)
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor]:  # (B, T_q, H, D), (2, H, B * T_q)
    """out, and the statistics of its rows."""
    assert softcap is None
    problem = Problem.of(q, k, cu_seqlens, causal, window, softcap, scale)
    out, stats = q.new_empty(q.shape), empty_statistics(q)
    q, k, v = (problem.stream(addressable(x)) for x in (q, k, v))
    native.attention_forward(_told(problem, causal, window), q, k, v, out, stats)
    return out, stats


def backward(
    dout: Tensor,  # (B, T_q, H, D)
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    out: Tensor,  # (B, T_q, H, D)
    stats: Tensor,  # (2, H, B * T_q)
    cu_seqlens: Tensor | None,  # (num_docs + 1,)
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # as q, k, v; empty where not needed
    """The gradients. They share most of their work: all are computed where one is needed."""
    problem = Problem.of(q, k, cu_seqlens, causal, window, softcap, scale)
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dout, q, k, v = (problem.stream(addressable(x)) for x in (dout, q, k, v))
    native.attention_backward(_told(problem, causal, window), dout, q, k, v, stats, (dq, dk, dv))
    needed = zip((dq, dk, dv), (need_dq, need_dk, need_dv), strict=True)
    dq, dk, dv = (x if need else x.new_empty(0) for x, need in needed)
    return dq, dk, dv


def _told(problem: Problem, causal: bool, window: int | None) -> native.Problem:
    ends = key_intervals(problem.num_queries, problem.num_keys, causal, window, problem.documents)
    lo, hi = (end.clamp(0, problem.num_keys).contiguous() for end in ends)
    told = native.Problem(
        problem.batch, problem.num_queries, problem.num_keys, problem.num_heads, problem.num_kv_heads, problem.head_dim,
        problem.scale, lo.data_ptr(), hi.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    told.kept = (lo, hi)  # as long as their addresses
    return told
