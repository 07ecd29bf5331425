"""The CPU implementation in torch: blocks of queries against the interval of keys that they see, in plain torch.

Holds the scores of one block of queries at a time instead of all T_q x T_k, forward and backward, and skips the
keys that no query of the block sees. The query heads of a group are rows of one matmul with their key head: nothing is
expanded.

Letters: G query heads per key head, R rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fasttrain_kernels._checks import wide
from fasttrain_kernels.ops.attention.intervals import key_intervals
from fasttrain_kernels.ops.attention.layout import AttentionProblem, empty_lse

_LOG2E = math.log2(math.e)
_BLOCK = 128  # rows of queries: large enough for a matmul to run at full speed


def _blocks(
    problem: AttentionProblem, causal: bool, window: int | None
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield blocks of queries, the keys that at least one of them sees, and the mask between both (None: all)."""
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


def _by_row(lse: Tensor, problem: AttentionProblem) -> Tensor:  # (S, H, B * T_q) -> (S, H, B, T_q)
    return lse.view(lse.shape[0], problem.num_heads, problem.batch, problem.num_queries)


def _ungroup(x: Tensor, num_heads: int) -> Tensor:  # (B, Hkv, G * R, D) -> (B, R, H, D)
    return x.reshape(x.shape[0], num_heads, -1, x.shape[-1]).transpose(1, 2)


def _scores(
    query: Tensor,  # (B, Hkv, G * R, D)
    key: Tensor,  # (B, Hkv, N, D)
    visible: Tensor | None,  # (R, N)
    problem: AttentionProblem,
) -> tuple[Tensor, Tensor | None]:  # (B, Hkv, G * R, N), and tanh with a softcap
    """q.k or tanh, times a factor for 16 bits: x of exponentials.py."""
    scores, tanh = query @ key.transpose(-1, -2), None
    if problem.softcap:
        tanh = torch.tanh(scores.mul_(problem.scale).div_(problem.softcap))
        scores = tanh.clone()
    if not problem.exact:
        scores.mul_(_factor(problem))
    if visible is not None:
        scores.masked_fill_(~visible.repeat(problem.group, 1).to(scores.device), -torch.inf)
    return scores, tanh


def _exponentials(
    scores: Tensor,  # (B, Hkv, G * R, N): overwritten
    pivot: Tensor,  # (B, Hkv, G * R, 1)
    problem: AttentionProblem,
) -> Tensor:  # (B, Hkv, G * R, N)
    scores.sub_(pivot)
    return (scores.mul_(_factor(problem)) if problem.exact else scores).exp2_()


def _factor(problem: AttentionProblem) -> float:
    return (problem.softcap or problem.scale) * _LOG2E


def _over_rows(
    weights: Tensor,  # (B, Hkv, G * R, N)
    rows: Tensor,  # (B, Hkv, G * R, D)
    problem: AttentionProblem,
) -> Tensor:  # (B, Hkv, N, D)
    """weights^T rows, head by head: one sum over all heads has up to twice the rounding error."""
    if problem.group == 1:
        return weights.transpose(-1, -2) @ rows
    weights, rows = (x.unflatten(2, (problem.group, -1)) for x in (weights, rows))
    return (weights.transpose(-1, -2) @ rows).sum(2)


def forward(
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    documents: Tensor | None,  # (2, B * T_k): intervals.document_bounds
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor]:  # (B, T_q, H, D), (S, H, B * T_q)
    """Return out and lse (see layout.empty_lse)."""
    problem = AttentionProblem.of(q, k, documents, causal, window, softcap, scale)
    out = q.new_empty(q.shape)
    lse = empty_lse(q)
    streamed, by_row = problem.stream(out), _by_row(lse, problem)
    q, k, v = problem.stream(q), problem.stream(k), problem.stream(v)
    for rows, keys, visible in _blocks(problem, causal, window):
        scores, _ = _scores(_by_group(q, rows, problem.num_kv_heads), _by_head(k, keys), visible, problem)
        if keys.start == keys.stop:
            streamed[:, rows], by_row[0, :, :, rows], by_row[1:, :, :, rows] = 0.0, torch.inf, 1.0
            continue
        pivot = scores.amax(-1, keepdim=True)
        # A query that sees nothing: exponentials relative to inf are 0, and so are theirs in backward.
        pivot.masked_fill_(pivot == -torch.inf, torch.inf)
        weights = _exponentials(scores, pivot, problem)
        total = weights.sum(-1, keepdim=True)
        total.masked_fill_(total == 0, 1.0)
        streamed[:, rows] = _ungroup((weights @ _by_head(v, keys)).div_(total), problem.num_heads).to(out.dtype)
        saved = (pivot, 1 / total) if problem.exact else (pivot + total.log2(),)
        for i, x in enumerate(saved):
            by_row[i, :, :, rows] = _ungroup(x, problem.num_heads)[..., 0].permute(2, 0, 1)
    return out, lse


def backward(
    dout: Tensor,  # (B, T_q, H, D)
    q: Tensor,  # (B, T_q, H, D)
    k: Tensor,  # (B, T_k, Hkv, D)
    v: Tensor,  # (B, T_k, Hkv, D)
    out: Tensor,  # (B, T_q, H, D)
    lse: Tensor,  # (S, H, B * T_q)
    documents: Tensor | None,  # (2, B * T_k): intervals.document_bounds
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # as q, k, v; empty where not needed
    """Return the gradients."""
    problem = AttentionProblem.of(q, k, documents, causal, window, softcap, scale)
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    dq = q.new_empty(q.shape if need_dq else (0,))
    shapes = (k.shape, v.shape)
    dout, q, k, v = (problem.stream(x) for x in (dout, q, k, v))
    dk, dv = (lse.new_zeros(x.shape).transpose(1, 2) for x in (k, v))  # (B, Hkv, T_k, D)
    by_token = _by_row(lse, problem).permute(0, 2, 3, 1)[..., None]  # (S, B, T_q, H, 1)
    for rows, keys, visible in _blocks(problem, causal, window):
        query, do, pivot, *inverse = (_by_group(x, rows, kv_heads) for x in (q, dout, *by_token))
        key, value = _by_head(k, keys), _by_head(v, keys)
        scores, tanh = _scores(query, key, visible, problem)
        p = _exponentials(scores, pivot, problem)
        if inverse:
            p.mul_(inverse[0])
        if need_dv:
            dv[:, :, keys] += _over_rows(p, do, problem)
        if not need_dq and not need_dk:
            continue
        dp = do @ value.transpose(-1, -2)
        ds = dp.sub_((p * dp).sum(-1, keepdim=True)).mul_(p)
        if tanh is not None:
            ds.mul_(1 - tanh * tanh)
        if need_dk:
            dk[:, :, keys] += _over_rows(ds, query, problem) * problem.scale
        if need_dq:
            problem.stream(dq)[:, rows] = _ungroup(ds @ key * problem.scale, heads).to(dq.dtype)
    return (
        dq,
        dk.transpose(1, 2).reshape(shapes[0]).to(k.dtype) if need_dk else k.new_empty(0),
        dv.transpose(1, 2).reshape(shapes[1]).to(v.dtype) if need_dv else v.new_empty(0),
    )
