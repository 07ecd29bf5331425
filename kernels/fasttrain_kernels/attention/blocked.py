"""The CPU form: blocks of queries against the interval of keys that they see, in plain torch.

Holds the scores of one block of queries at a time instead of all T_q x T_k, forward and backward, and skips the
keys that no query of the block sees. The query heads of a group are rows of one matrix product with their key head:
nothing is expanded.

Letters: G query heads per key head, R rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fasttrain_kernels._checks import wide
from fasttrain_kernels.attention.intervals import key_intervals
from fasttrain_kernels.attention.layout import Problem

_LOG2E = math.log2(math.e)
_BLOCK = 128  # rows of queries: large enough for a matrix product to run at full speed


def _blocks(problem: Problem, causal: bool, window: int | None) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, the keys that at least one of them sees, and which of those each one sees (None: all)."""
    lo, hi = key_intervals(problem.num_queries, problem.num_keys, causal, window, problem.documents)
    for start in range(0, problem.num_queries, _BLOCK):
        rows = slice(start, min(start + _BLOCK, problem.num_queries))
        begin = int(lo[start])
        end = max(begin, int(hi[rows.stop - 1]))
        if lo[rows.stop - 1] == begin and hi[start] == end:
            yield rows, slice(begin, end), None
        else:
            key = torch.arange(begin, end)
            visible = (key >= lo[rows, None]) & (key < hi[rows, None])
            yield rows, slice(begin, end), visible


def _by_head(x: Tensor, tokens: slice) -> Tensor:  # (B, T, Hkv, D) -> (B, Hkv, N, D)
    return wide(x[:, tokens]).transpose(1, 2)


def _by_group(x: Tensor, rows: slice, num_kv_heads: int) -> Tensor:  # (B, T, H, D) -> (B, Hkv, G * R, D)
    B, _, H, D = x.shape
    block = wide(x[:, rows]).reshape(B, -1, num_kv_heads, H // num_kv_heads, D)
    return block.permute(0, 2, 3, 1, 4).reshape(B, num_kv_heads, -1, D)


def _ungroup(x: Tensor, num_heads: int) -> Tensor:  # (B, Hkv, G * R, D) -> (B, R, H, D)
    return x.reshape(x.shape[0], num_heads, -1, x.shape[-1]).transpose(1, 2)


def _logits(
    query: Tensor,  # (B, Hkv, G * R, D)
    key: Tensor,  # (B, Hkv, N, D)
    visible: Tensor | None,  # (R, N)
    problem: Problem,
) -> tuple[Tensor, Tensor | None]:  # (B, Hkv, G * R, N), and tanh with a softcap
    """Logits in units of ln 2, as lse."""
    scores = query @ key.transpose(-1, -2)
    tanh = None
    if problem.softcap:
        tanh = torch.tanh(scores.mul_(problem.scale / problem.softcap))
        scores = tanh * (problem.softcap * _LOG2E)
    else:
        scores.mul_(problem.scale * _LOG2E)
    if visible is not None:
        scores.masked_fill_(~visible.repeat(problem.group, 1), -torch.inf)
    return scores, tanh


def forward(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    cu_seqlens: Tensor | None,  # (num_docs + 1,)
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor]:  # (B, T_q, H, D), (H, B * T_q)
    """out, and lse in units of ln 2, on the CPU."""
    problem = Problem.of(q, k, cu_seqlens, causal, window, softcap, scale)
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(problem.num_heads, problem.batch, problem.num_queries, dtype=wide(q.new_empty(0)).dtype)
    streamed = problem.stream(out)  # views of out and lse by stream position
    q, k, v = problem.stream(q), problem.stream(k), problem.stream(v)
    for rows, keys, visible in _blocks(problem, causal, window):
        logits, _ = _logits(_by_group(q, rows, problem.num_kv_heads), _by_head(k, keys), visible, problem)
        if keys.start == keys.stop:
            streamed[:, rows], lse[:, :, rows] = 0.0, -torch.inf
            continue
        maximum = logits.amax(-1, keepdim=True)
        weights = logits.sub_(_finite(maximum)).exp2_()
        total = weights.sum(-1, keepdim=True)
        block = (weights @ _by_head(v, keys)).div_(
            total.clamp_min(1e-30)
        )  # no less than 1, but for queries without keys
        streamed[:, rows] = _ungroup(block, problem.num_heads).to(out.dtype)
        lse[:, :, rows] = _ungroup(maximum + total.log2(), problem.num_heads)[..., 0].permute(2, 0, 1)
    return out, lse.reshape(problem.num_heads, -1)


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0.0)  # a query that sees nothing: exp2(-inf - 0) is 0, not NaN


def backward(
    dout: Tensor,  # (B, T_q, H, D)
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    out: Tensor,  # (B, T_q, H, D)
    lse: Tensor,  # (H, B * T_q)
    cu_seqlens: Tensor | None,  # (num_docs + 1,)
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # as q, k, v; empty where not needed
    """The gradients on the CPU."""
    problem = Problem.of(q, k, cu_seqlens, causal, window, softcap, scale)
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    dq = torch.empty(q.shape if need_dq else (0,), dtype=q.dtype)
    shapes = (k.shape, v.shape)
    dout, q, k, v, out = (problem.stream(x) for x in (dout, q, k, v, out))
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype).transpose(1, 2) for x in (k, v))  # (B, Hkv, T_k, D)
    lse_by_token = lse.reshape(heads, problem.batch, -1).permute(1, 2, 0)[..., None]  # (B, T_q, H, 1)
    for rows, keys, visible in _blocks(problem, causal, window):
        query, do, o, sums = (_by_group(x, rows, kv_heads) for x in (q, dout, out, lse_by_token))
        key, value = _by_head(k, keys), _by_head(v, keys)
        logits, tanh = _logits(query, key, visible, problem)
        p = logits.sub_(_finite(sums)).exp2_()
        if need_dv:
            dv[:, :, keys] += p.transpose(-1, -2) @ do
        if not need_dq and not need_dk:
            continue
        ds = (do @ value.transpose(-1, -2)).sub_((do * o).sum(-1, keepdim=True)).mul_(p)
        if tanh is not None:
            ds.mul_(1 - tanh * tanh)
        if need_dk:
            dk[:, :, keys] += ds.transpose(-1, -2) @ query * problem.scale
        if need_dq:
            problem.stream(dq)[:, rows] = _ungroup(ds @ key * problem.scale, heads).to(dq.dtype)
    return (
        dq,
        dk.transpose(1, 2).reshape(shapes[0]).to(k.dtype) if need_dk else k.new_empty(0),
        dv.transpose(1, 2).reshape(shapes[1]).to(v.dtype) if need_dv else v.new_empty(0),
    )
