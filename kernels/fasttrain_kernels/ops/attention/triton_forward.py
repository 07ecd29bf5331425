"""Flash attention forward: a tile of queries against the blocks of its keys, with a running maximum and sum.

    m = max x                               x of a score, and exp: exponentials.py
    l = sum exp(x - m)                      out = sum exp(x - m) / l * v

Saved for backward (layout.empty_lse): m and 1 / l in float32, m + log2(l) for 16 bits. The running maximum
starts at a finite number, so that a query that sees nothing produces no NaN: out = 0, and m = inf for backward,
relative to which every exponential is 0.

Letters: M queries of a tile, N keys of a block, D head dimension; a group is the query heads that share a key head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain_kernels._launch import launch
from fasttrain_kernels._triton import tl, triton
from fasttrain_kernels.ops.attention.exponentials import exponent_factor, score_factor, scores
from fasttrain_kernels.ops.attention.intervals import block_ranges, edge_block, interval
from fasttrain_kernels.ops.attention.layout import AttentionProblem, addressable, empty_lse
from fasttrain_kernels.ops.attention.tile_ops import (
    inverse_sum_offset,
    load_rows,
    matmul_add,
    matmul_transposed,
    store_rows,
)
from fasttrain_kernels.ops.attention.tiles import forward_tile, one_query_tile

LOWEST = tl.constexpr(-3.0e38)  # finite: exp2(-inf - LOWEST) is 0, where exp2(-inf - -inf) would be NaN


@triton.jit
def _fwd_block(
    acc, l, m, query, k, v, k_token, v_token, start, lo, hi, num_keys,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys: the running output, sum and maximum after it."""
    key = load_rows(k, start, k_token, num_keys, N, D, BLOCK_D, MASKED)
    s = scores(matmul_transposed(query, key), SCALE, SOFTCAP, EXACT)
    if MASKED:
        j = start + tl.arange(0, N)
        s = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), s, float("-inf"))
    inner, outer = score_factor(SCALE, SOFTCAP, EXACT), exponent_factor(SCALE, SOFTCAP, EXACT)
    m_new = tl.maximum(m, tl.max(s, 1) * inner)
    p = tl.exp2((s * inner - m_new[:, None]) * outer)
    decay = tl.exp2((m - m_new) * outer)
    l = l * decay + tl.sum(p, 1)
    value = load_rows(v, start, v_token, num_keys, N, D, BLOCK_D, MASKED)
    acc = matmul_add(acc * decay[:, None], p.to(value.dtype), value, EXACT)
    return acc, l, m_new


# 31 arguments: q, k and v are views of a projection, with three strides each: copies would cost a pass over memory.
@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_tiles", "lse_head"])
def _attention_fwd_kernel(
    q, k, v, out, lse, documents,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_token, lse_head,
    num_queries, num_keys, num_tiles, num_kv_heads, group,
    BACK: tl.constexpr, AHEAD: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    # The heads of a group run side by side and share their keys in L2; late queries, which see most, come first.
    pid = tl.program_id(0)
    first = (num_tiles - 1 - pid // group % num_tiles) * M
    kv_head = (pid // (group * num_tiles) % num_kv_heads).to(tl.int64)
    head = kv_head * group + pid % group
    batch = (pid // (group * num_tiles * num_kv_heads)).to(tl.int64)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head

    shift = num_keys - num_queries
    last = tl.minimum(first + M, num_queries) - 1
    row = first + tl.arange(0, M)
    begin, full, full_end, num_blocks = block_ranges(first, last, shift, num_keys, documents, BACK, AHEAD, N)
    query = load_rows(q, first, q_token, num_queries, M, D, BLOCK_D, True)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    l = tl.zeros((M,), tl.float32)
    m = tl.full((M,), LOWEST, tl.float32)
    for block in range(full, full_end):
        acc, l, m = _fwd_block(
            acc, l, m, query, k, v, k_token, v_token, begin + block * N, None, None, num_keys,
            SCALE, SOFTCAP, EXACT, D, BLOCK_D, N, False,
        )  # fmt: skip
    lo, hi = interval(row, shift, num_keys, documents, BACK, AHEAD)  # not earlier: registers
    for i in range(0, num_blocks - (full_end - full)):
        acc, l, m = _fwd_block(
            acc, l, m, query, k, v, k_token, v_token, begin + edge_block(i, full, full_end) * N, lo, hi, num_keys,
            SCALE, SOFTCAP, EXACT, D, BLOCK_D, N, True,
        )  # fmt: skip

    seen = l > 0
    l = tl.where(seen, l, 1.0)
    out += batch * num_queries * out_token + head * D
    store_rows(acc / l[:, None], out, first, out_token, num_queries, M, D, BLOCK_D)
    lse += head * lse_head + batch * num_queries
    if EXACT:
        tl.store(lse + inverse_sum_offset(num_kv_heads * group, lse_head) + row, 1.0 / l, mask=row < num_queries)
    else:
        m += tl.log2(l)
    tl.store(lse + row, tl.where(seen, m, float("inf")), mask=row < num_queries)


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
    """Launch the forward kernel; returns out and lse."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = empty_lse(q)
    if out.numel() == 0:
        return out, lse
    problem = AttentionProblem.of(q, k, documents, causal, window, softcap, scale)
    q, k, v = (addressable(problem.stream(x)) for x in (q, k, v))
    tile = one_query_tile(q, problem.block_d) if problem.one_query else forward_tile(q, problem.block_d)
    num_tiles = triton.cdiv(problem.num_queries, tile.own)
    launch(
        _attention_fwd_kernel,
        (problem.batch * problem.num_heads * num_tiles,),
        *(q, k, v, out, lse, problem.documents),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], problem.num_heads * problem.head_dim, lse.stride(1)),
        *(problem.num_queries, problem.num_keys, num_tiles, problem.num_kv_heads, problem.group),
        **problem.constants,
        M=tile.own,
        N=tile.step,
        **tile.options,
    )
    return out, lse
