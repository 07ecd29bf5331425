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
    out, stats = torch.empty(q.shape), empty_statistics(q)
    given = (problem.stream(addressable(x)) for x in (q, k, v))
    native.attention_forward(_told(problem, causal, window), *given, out, stats)
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
    dq, dk, dv = (torch.empty(x.shape) for x in (q, k, v))
    given = (problem.stream(addressable(x)) for x in (dout, q, k, v))
    native.attention_backward(
        _told(problem, causal, window), *given, out, stats, (dq, dk, dv)
    )
    empty = torch.empty(0)
    return dq if need_dq else empty, dk if need_dk else empty.clone(), dv if need_dv else empty.clone()


def _told(problem: Problem, causal: bool, window: int | None) -> native.Problem:
    ends = key_intervals(problem.num_queries, problem.num_keys, causal, window, problem.documents)
    lo, hi = (end.clamp(0, problem.num_keys).contiguous() for end in ends)
    told = native.Problem(
        problem.batch, problem.num_queries, problem.num_keys, problem.num_heads, problem.num_kv_heads, problem.head_dim,
        problem.scale, lo.data_ptr(), hi.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    told.kept = (lo, hi)
    return told
