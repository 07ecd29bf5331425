"""Flash attention backward: probabilities are recomputed, and every gradient has one writer.

    p = exp(x - m) / l              delta = rowsum(dout * out)          from 16 bits p = exp(x - (m + log2 l))
    dv = p^T dout                   ds    = p * (dout v^T - delta) [* (1 - tanh^2) with a softcap]
    dq = scale * ds k               dk    = scale * ds^T q

Two kernels after the one for delta: the first owns a tile of keys and runs over the queries that see it, of all the
heads of its group; the second owns a tile of queries, as forward does. Each recomputes p, which makes 7 matmuls
instead of 5; in return there are no atomics, no second buffer for dq, and the result does not depend on
the order of programs.

Letters as in triton_forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttrain_kernels._launch import launch
from fasttrain_kernels._triton import tl, triton
from fasttrain_kernels.ops.attention.exponentials import exponent_factor, score_factor, scores
from fasttrain_kernels.ops.attention.intervals import block_ranges, edge_block, interval
from fasttrain_kernels.ops.attention.layout import AttentionProblem, addressable
from fasttrain_kernels.ops.attention.tile_ops import (
    inverse_sum_offset,
    load_rows,
    matmul_add,
    matmul_transposed,
    store_rows,
)
from fasttrain_kernels.ops.attention.tiles import delta_tile, key_gradient_tile, one_query_tile, query_gradient_tile


@triton.jit(do_not_specialize=["num_queries", "num_tiles", "delta_head"])
def _attention_delta_kernel(
    dout, out, delta, dout_batch, dout_token, dout_head, out_token, delta_head, num_queries, num_tiles, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head = (pid % num_heads).to(tl.int64)  # neighbouring heads are neighbours in memory
    first = pid // num_heads % num_tiles * M
    batch = (pid // (num_heads * num_tiles)).to(tl.int64)
    dout += batch * dout_batch + head * dout_head
    out += batch * num_queries * out_token + head * D
    do = load_rows(dout, first, dout_token, num_queries, M, D, BLOCK_D, True)
    o = load_rows(out, first, out_token, num_queries, M, D, BLOCK_D, True)
    # The diagonal of a matmul, because dp is a matmul too: where one key has all the probability, out is its value,
    # and dp - delta must be 0 and not what two orders of summation differ by.
    i = tl.arange(0, M)
    full = tl.dot(do, tl.trans(o), input_precision="ieee")
    sums = tl.sum(tl.where(i[:, None] == i[None, :], full, 0.0), 1)
    row = first + i
    tl.store(delta + head * delta_head + batch * num_queries + row, sums, mask=row < num_queries)


@triton.jit
def _key_gradient_block(
    dk, dv, key, value, q, dout, lse, second, delta, q_token, dout_token, start, lo, hi, num_queries,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of queries, all tiles transposed: keys down, queries across."""
    row = start + tl.arange(0, M)
    query = load_rows(q, start, q_token, num_queries, M, D, BLOCK_D, MASKED)
    s = scores(matmul_transposed(key, query), SCALE, SOFTCAP, EXACT)
    m = tl.load(lse + row, mask=row < num_queries, other=float("inf"))
    p = tl.exp2((s * score_factor(SCALE, SOFTCAP, EXACT) - m[None, :]) * exponent_factor(SCALE, SOFTCAP, EXACT))
    if EXACT:
        p *= tl.load(lse + second + row, mask=row < num_queries, other=0.0)[None, :]
    if MASKED:
        p = tl.where((row[None, :] >= lo[:, None]) & (row[None, :] < hi[:, None]), p, 0.0)
    do = load_rows(dout, start, dout_token, num_queries, M, D, BLOCK_D, MASKED)
    if NEED_DV:
        dv = matmul_add(dv, p.to(do.dtype), do, EXACT)
    if NEED_DK:
        dp = matmul_transposed(value, do)
        ds = p * (dp - tl.load(delta + row, mask=row < num_queries, other=0.0)[None, :])
        if SOFTCAP > 0:
            ds *= 1 - s * s
        dk = matmul_add(dk, ds.to(query.dtype), query, EXACT)
    return dk, dv


# 39 arguments: five tensors to read, each with strides of its own, and two gradients, each only where it is wanted.
@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_tiles", "lse_head"])
def _attention_key_gradient_kernel(
    q, k, v, dout, lse, delta, dk, dv, documents,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    dout_batch, dout_token, dout_head, grad_token, lse_head,
    num_queries, num_keys, num_tiles, num_kv_heads, group,
    BACK: tl.constexpr, AHEAD: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    first = pid % num_tiles * N  # early keys, which most queries see, come first
    kv_head = (pid // num_tiles % num_kv_heads).to(tl.int64)
    batch = (pid // (num_tiles * num_kv_heads)).to(tl.int64)
    key = load_rows(k + batch * k_batch + kv_head * k_head, first, k_token, num_keys, N, D, BLOCK_D, True)
    value = load_rows(v + batch * v_batch + kv_head * v_head, first, v_token, num_keys, N, D, BLOCK_D, True)

    # The same intervals with the roles of queries and keys exchanged.
    shift = num_queries - num_keys
    last = tl.minimum(first + N, num_keys) - 1
    begin, full, full_end, num_blocks = block_ranges(first, last, shift, num_queries, documents, AHEAD, BACK, M)
    dk_acc = tl.zeros((N, BLOCK_D), tl.float32)
    dv_acc = tl.zeros((N, BLOCK_D), tl.float32)
    # One loop over all heads of the group: software pipelining continues across the border between two heads, and
    # nested loops need so many more registers that they spill on every target.
    q += batch * q_batch + kv_head * group * q_head
    dout += batch * dout_batch + kv_head * group * dout_head
    second = inverse_sum_offset(num_kv_heads * group, lse_head)
    lse += kv_head * group * lse_head + batch * num_queries
    delta += kv_head * group * lse_head + batch * num_queries
    num_full = full_end - full
    num_edges = num_blocks - num_full
    # At least 1 as divisors: pipelined loads compute addresses before it is known that the loop runs at all.
    full_per_head, edges_per_head = tl.maximum(num_full, 1), tl.maximum(num_edges, 1)
    for i in range(0, group * num_full):
        member = tl.cast(i // full_per_head, tl.int64)
        dk_acc, dv_acc = _key_gradient_block(
            dk_acc, dv_acc, key, value, q + member * q_head, dout + member * dout_head, lse + member * lse_head,
            second, delta + member * lse_head, q_token, dout_token, begin + (full + i % full_per_head) * M, None,
            None, num_queries, SCALE, SOFTCAP, EXACT, D, BLOCK_D, M, NEED_DK, NEED_DV, False,
        )  # fmt: skip
    lo, hi = interval(first + tl.arange(0, N), shift, num_queries, documents, AHEAD, BACK)  # not earlier: registers
    for i in range(0, group * num_edges):
        member = tl.cast(i // edges_per_head, tl.int64)
        dk_acc, dv_acc = _key_gradient_block(
            dk_acc, dv_acc, key, value, q + member * q_head, dout + member * dout_head, lse + member * lse_head,
            second, delta + member * lse_head, q_token, dout_token,
            begin + edge_block(i % edges_per_head, full, full_end) * M,
            lo, hi, num_queries, SCALE, SOFTCAP, EXACT, D, BLOCK_D, M, NEED_DK, NEED_DV, True,
        )  # fmt: skip
    offset = batch * num_keys * grad_token + kv_head * D
    if NEED_DK:
        store_rows(dk_acc * SCALE, dk + offset, first, grad_token, num_keys, N, D, BLOCK_D)
    if NEED_DV:
        store_rows(dv_acc, dv + offset, first, grad_token, num_keys, N, D, BLOCK_D)


@triton.jit
def _query_gradient_block(
    acc, query, do, m, inverse_l, delta, k, v, k_token, v_token, start, lo, hi, num_keys,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    N: tl.constexpr, DELTA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys: dq after it, or if DELTA the sum of p * dp."""
    key = load_rows(k, start, k_token, num_keys, N, D, BLOCK_D, MASKED)
    s = scores(matmul_transposed(query, key), SCALE, SOFTCAP, EXACT)
    p = tl.exp2((s * score_factor(SCALE, SOFTCAP, EXACT) - m[:, None]) * exponent_factor(SCALE, SOFTCAP, EXACT))
    if EXACT:
        p *= inverse_l[:, None]
    if MASKED:
        j = start + tl.arange(0, N)
        p = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), p, 0.0)
    value = load_rows(v, start, v_token, num_keys, N, D, BLOCK_D, MASKED)
    dp = matmul_transposed(do, value)
    if DELTA:
        # Not p * dp: contracted with the sum's first addition, its rounding would depend on the lane, and with it which
        # of two values of delta is stored.
        acc += tl.sum(tl.fma(p, dp, 0.0), 1)
    else:
        ds = p * (dp - delta[:, None])
        if SOFTCAP > 0:
            ds *= 1 - s * s
        acc = matmul_add(acc, ds.to(key.dtype), key, EXACT)
    return acc


# 37 arguments: the same five tensors, and dq.
@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_tiles", "lse_head"])
def _attention_query_gradient_kernel(
    q, k, v, dout, lse, delta, dq, documents,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    dout_batch, dout_token, dout_head, grad_token, lse_head,
    num_queries, num_keys, num_tiles, num_kv_heads, group,
    BACK: tl.constexpr, AHEAD: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # in forward's order
    first = (num_tiles - 1 - pid // group % num_tiles) * M
    kv_head = (pid // (group * num_tiles) % num_kv_heads).to(tl.int64)
    head = kv_head * group + pid % group
    batch = (pid // (group * num_tiles * num_kv_heads)).to(tl.int64)
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head

    shift = num_keys - num_queries
    last = tl.minimum(first + M, num_queries) - 1
    row = first + tl.arange(0, M)
    begin, full, full_end, num_blocks = block_ranges(first, last, shift, num_keys, documents, BACK, AHEAD, N)
    query = load_rows(q + batch * q_batch + head * q_head, first, q_token, num_queries, M, D, BLOCK_D, True)
    do = load_rows(dout + batch * dout_batch + head * dout_head, first, dout_token, num_queries, M, D, BLOCK_D, True)
    offset = head * lse_head + batch * num_queries
    m = tl.load(lse + offset + row, mask=row < num_queries, other=float("inf"))
    inverse_l = None
    if EXACT:
        second = inverse_sum_offset(num_kv_heads * group, lse_head)
        inverse_l = tl.load(lse + second + offset + row, mask=row < num_queries, other=0.0)
    delta_rows = None if DELTA else tl.load(delta + offset + row, mask=row < num_queries, other=0.0)
    acc = tl.zeros((M,) if DELTA else (M, BLOCK_D), tl.float32)
    for block in range(full, full_end):
        acc = _query_gradient_block(
            acc, query, do, m, inverse_l, delta_rows, k, v, k_token, v_token, begin + block * N, None, None, num_keys,
            SCALE, SOFTCAP, EXACT, D, BLOCK_D, N, DELTA, False,
        )  # fmt: skip
    lo, hi = interval(row, shift, num_keys, documents, BACK, AHEAD)
    for i in range(0, num_blocks - (full_end - full)):
        acc = _query_gradient_block(
            acc, query, do, m, inverse_l, delta_rows, k, v, k_token, v_token,
            begin + edge_block(i, full, full_end) * N, lo, hi, num_keys,
            SCALE, SOFTCAP, EXACT, D, BLOCK_D, N, DELTA, True,
        )  # fmt: skip
    if DELTA:
        tl.store(delta + offset + row, acc, mask=row < num_queries)
    else:
        dq += batch * num_queries * grad_token + head * D
        store_rows(acc * SCALE, dq, first, grad_token, num_queries, M, D, BLOCK_D)


def _delta_of_out(dout: Tensor, out: Tensor, delta: Tensor, problem: AttentionProblem) -> None:
    tile = delta_tile(dout)
    num_tiles = triton.cdiv(problem.num_queries, tile.own)
    launch(
        _attention_delta_kernel,
        (problem.batch * num_tiles * problem.num_heads,),
        *(dout, out, delta),
        *(*dout.stride()[:3], out.stride(1), delta.stride(0), problem.num_queries, num_tiles, problem.num_heads),
        D=problem.head_dim,
        BLOCK_D=problem.block_d,
        M=tile.own,
        **tile.options,
    )


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
    """Launch the backward kernels; returns the gradients."""
    dq, dk, dv = (
        torch.empty(x.shape if need else (0,), dtype=x.dtype, device=x.device)
        for x, need in ((q, need_dq), (k, need_dk), (v, need_dv))
    )
    problem = AttentionProblem.of(q, k, documents, causal, window, softcap, scale)
    dout, q, k, v, out = (addressable(problem.stream(x)) for x in (dout, q, k, v, out))
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    sizes = (problem.num_queries, problem.num_keys)

    def query_kernel(delta: Tensor, **what: bool) -> None:
        tile = query_gradient_tile(q, problem.block_d, problem.softcap > 0)
        if problem.one_query:
            tile = one_query_tile(q, problem.block_d)
        num_tiles = triton.cdiv(problem.num_queries, tile.own)
        launch(
            _attention_query_gradient_kernel,
            (problem.batch * problem.num_heads * num_tiles,),
            *(q, k, v, dout, lse, delta, dq, problem.documents),
            *(*strides, problem.num_heads * problem.head_dim, lse.stride(1)),
            *(*sizes, num_tiles, problem.num_kv_heads, problem.group),
            **problem.constants,
            M=tile.own,
            N=tile.step,
            **what,
            **tile.options,
        )

    delta = lse  # dv does without it
    if (need_dq or need_dk) and q.numel():
        delta = torch.empty(lse.shape[1:], dtype=torch.float32, device=q.device)
        if problem.exact:
            query_kernel(delta, DELTA=True)
        else:
            _delta_of_out(dout, out, delta, problem)
    if dk.numel() or dv.numel():
        tile = key_gradient_tile(q, problem.block_d, problem.softcap > 0)
        if problem.one_query:
            tile = one_query_tile(q, problem.block_d).swapped()
        num_tiles = triton.cdiv(problem.num_keys, tile.own)
        launch(
            _attention_key_gradient_kernel,
            (problem.batch * problem.num_kv_heads * num_tiles,),
            *(q, k, v, dout, lse, delta, dk, dv, problem.documents),
            *(*strides, problem.num_kv_heads * problem.head_dim, lse.stride(1)),
            *(*sizes, num_tiles, problem.num_kv_heads, problem.group),
            **problem.constants,
            M=tile.step,
            N=tile.own,
            NEED_DK=need_dk,
            NEED_DV=need_dv,
            **tile.options,
        )
    if dq.numel():
        query_kernel(delta, DELTA=False)
    return dq, dk, dv
