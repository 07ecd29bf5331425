"""Per-head RMSNorm of queries and keys, then rotary embedding, in one pass over both.

    xhat = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps)          over the D dimensions of a head
    y    = xhat * weight
    out  = (y1 * cos - y2 * sin,  y2 * cos + y1 * sin)          for each rotary pair (y1, y2)

    g    = (d1 * cos + d2 * sin,  d2 * cos - d1 * sin)          the inverse rotation of dout
    dx   = rstd * (g * weight - xhat * mean(g * weight * xhat))
    dw   = sum over tokens and heads of g * xhat

Pairs are (i, i + R/2), as Transformers' rotate_half has them, or (2i, 2i + 1) when interleaved; dimensions from R on
are only normalised. xhat and y are rounded to the dtype of x, as Qwen3 in Transformers does it; the rotation is
computed in float32 and rounded once.

Elements moved per element of q and k: forward reads 1 and writes 1, backward reads 2 and writes 1; without a weight it
reads dout only. Eager PyTorch in bf16 moves about 28 forward. A program takes a few tokens with all their q and k
heads, so that cos and sin of a token are read once. Backward recomputes rstd from x, which it reads anyway, so that
only inputs are saved. dw is summed in float32: in the registers of each of P programs, then over programs by a second
kernel, always in the same order.

B batch, T tokens, H heads (Hq, Hk), D dimensions of a head, R rotary dimensions, S rows of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttrain_kernels._checks import check_tensors, empty_like_contiguous, shape, wide
from fasttrain_kernels._registration import multiprocessor_count, register, warps

_OP = "qk_norm_rope"
_MAX_HEAD_DIM = 512  # one head has to fit a tile
_THREADS = 128
# Elements of x in a tile. Forward: four 128-bit loads of bf16 in flight per lane. Backward holds x, dout and the sums
# of dw for q and k in registers, so half of that.
_FORWARD_TILE = 4096
_BACKWARD_TILE = 2048
_BACKWARD_PROGRAMS_PER_SM = 3  # 168 registers x 128 threads x 3 fill a register file: one wave of programs
_MAX_HEADS = 8
_VARYING = ("T", "NUM_TOKENS", "S", "positions_stride_b", "positions_stride_t")  # one kernel for all lengths


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
    cos, sin = _table_rows(cos, positions, q.shape[1]), _table_rows(sin, positions, q.shape[1])
    q_out = _rotate(_normalise(q, q_weight, eps), cos, sin, interleaved).to(q.dtype)
    k_out = _rotate(_normalise(k, k_weight, eps), cos, sin, interleaved).to(k.dtype)
    return q_out, k_out


def _table_rows(table: Tensor, positions: Tensor | None, T: int) -> Tensor:  # -> (T, 1, R/2) or (B, T, 1, R/2)
    return wide(table[:T] if positions is None else table[positions])[..., None, :]


def _normalise(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return wide(x)
    xhat = wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
    return wide((wide(xhat.to(x.dtype)) * wide(weight)).to(x.dtype))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    R = 2 * cos.shape[-1]
    rotary, rest = x[..., :R], x[..., R:]
    if interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = rotary.chunk(2, dim=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((rotated, rest), dim=-1)


@triton.jit
def _columns(D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr):
    """The dimensions of pair i of a tile, (1, 1, HALF) each. Pairs from R/2 on are made of the dimensions from R on,
    lower half with upper half; they turn by an angle of 0, so that partial rotary needs no further tile."""
    pair = tl.arange(0, HALF)[None, None, :]
    if R == D:
        return pair, pair + R // 2
    rotary = pair < R // 2
    first = tl.where(rotary, pair, pair + R // 2)
    second = tl.where(rotary, pair + R // 2, pair + R // 2 + (D - R + 1) // 2)
    return first, second


@triton.jit
def _load_heads(x, offset, mask, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second members of the pairs of each head, in float32; offset and mask are (tokens, heads, 1).
    Interleaved pairs are loaded as they lie, for 128-bit accesses, and separated in registers."""
    if INTERLEAVED:
        col = tl.arange(0, 2 * HALF)[None, None, :]
        pairs = tl.load(x + offset + col, mask=mask & (col < D), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(pairs, [pairs.shape[0], pairs.shape[1], HALF, 2]))
    else:
        col1, col2 = _columns(D, R, HALF)
        inside = mask & (tl.arange(0, HALF)[None, None, :] < (D + 1) // 2)
        first = tl.load(x + offset + col1, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + offset + col2, mask=mask & (col2 < D), other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_heads(
    out, offset, mask, first, second,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        col = tl.arange(0, 2 * HALF)[None, None, :]
        pairs = tl.reshape(tl.join(first, second), [first.shape[0], first.shape[1], 2 * HALF])
        tl.store(out + offset + col, pairs.to(out.dtype.element_ty), mask=mask & (col < D))
    else:
        col1, col2 = _columns(D, R, HALF)
        inside = mask & (tl.arange(0, HALF)[None, None, :] < (D + 1) // 2)
        tl.store(out + offset + col1, first.to(out.dtype.element_ty), mask=inside)
        tl.store(out + offset + col2, second.to(out.dtype.element_ty), mask=mask & (col2 < D))


@triton.jit
def _load_weight(weight, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    start = tl.zeros([1, 1, 1], tl.int32)
    return _load_heads(weight, start, start == 0, D, R, HALF, INTERLEAVED)


@triton.jit
def _load_tables(
    cos, sin, cos_stride, sin_stride, positions, positions_stride_b, positions_stride_t, batch, step, inside, S,
    R: tl.constexpr, HALF: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """cos and sin of each token, (tokens, 1, HALF); NaN where its position has no row in the tables."""
    position, known = step, inside
    if POSITIONS:
        at = positions + batch * positions_stride_b + step * positions_stride_t
        position = tl.load(at, mask=inside, other=0).to(tl.int64)
        known = inside & (position >= 0) & (position < S)
    pair = tl.arange(0, HALF)[None, None, :]
    mask = known & (pair < R // 2)
    c = tl.load(cos + position * cos_stride + pair, mask=mask, other=1.0).to(tl.float32)
    s = tl.load(sin + position * sin_stride + pair, mask=mask, other=0.0).to(tl.float32)
    if POSITIONS:
        c = tl.where(known | (inside == 0), c, float("nan"))
    return c, s


@triton.jit
def _mean_product(a1, a2, b1, b2, D: tl.constexpr):  # (tokens, heads, HALF) -> (tokens, heads, 1)
    return tl.sum(a1 * b1 + a2 * b2, axis=2, keep_dims=True) / D


@triton.jit
def _round(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _forward_heads(
    x, x_offset, x_stride_h, weight, out, token, inside, cos, sin, eps,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    if NORM:
        w1, w2 = _load_weight(weight, D, R, HALF, INTERLEAVED)
    for start in range(0, H, HEADS):
        head = (start + tl.arange(0, HEADS))[None, :, None].to(tl.int64)
        mask = inside & (head < H)
        x1, x2 = _load_heads(x, x_offset + head * x_stride_h, mask, D, R, HALF, INTERLEAVED)
        if NORM:
            rstd = tl.rsqrt(_mean_product(x1, x2, x1, x2, D) + eps)
            x1 = _round(_round(x1 * rstd, x) * w1, x)
            x2 = _round(_round(x2 * rstd, x) * w2, x)
        y1 = x1 * cos - x2 * sin
        y2 = x2 * cos + x1 * sin
        _store_heads(out, (token * H + head) * D, mask, y1, y2, D, R, HALF, INTERLEAVED)


@triton.jit(do_not_specialize=_VARYING)
def _qk_norm_rope_fwd_kernel(
    q, k, q_weight, k_weight, cos, sin, positions, q_out, k_out,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    cos_stride, sin_stride, positions_stride_b, positions_stride_t, T, NUM_TOKENS, S,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    inside = token < NUM_TOKENS
    batch, step = (token // T).to(tl.int64), (token % T).to(tl.int64)
    token = token.to(tl.int64)
    c, s = _load_tables(
        cos, sin, cos_stride, sin_stride, positions, positions_stride_b, positions_stride_t,
        batch, step, inside, S, R, HALF, POSITIONS,
    )  # fmt: skip
    _forward_heads(
        q, batch * q_stride_b + step * q_stride_t, q_stride_h, q_weight, q_out, token, inside, c, s, EPS,
        HQ, HEADS, D, R, HALF, INTERLEAVED, Q_NORM,
    )  # fmt: skip
    _forward_heads(
        k, batch * k_stride_b + step * k_stride_t, k_stride_h, k_weight, k_out, token, inside, c, s, EPS,
        HK, HEADS, D, R, HALF, INTERLEAVED, K_NORM,
    )  # fmt: skip


@triton.jit
def _backward_heads(
    dout, dout_offset, dout_stride_h, x, x_offset, x_stride_h, weight, dx, dw1, dw2,
    token, inside, cos, sin, eps,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    # Read again for each tile, from L1: held over the loop, the weights of q and k would need registers of their own.
    if NORM and DX:
        w1, w2 = _load_weight(weight, D, R, HALF, INTERLEAVED)
    for start in range(0, H, HEADS):
        head = (start + tl.arange(0, HEADS))[None, :, None].to(tl.int64)
        mask = inside & (head < H)
        d1, d2 = _load_heads(dout, dout_offset + head * dout_stride_h, mask, D, R, HALF, INTERLEAVED)
        g1 = d1 * cos + d2 * sin
        g2 = d2 * cos - d1 * sin
        if NORM:
            x1, x2 = _load_heads(x, x_offset + head * x_stride_h, mask, D, R, HALF, INTERLEAVED)
            rstd = tl.rsqrt(_mean_product(x1, x2, x1, x2, D) + eps)
            x1, x2 = x1 * rstd, x2 * rstd
            if DW:
                dw1 += g1 * x1
                dw2 += g2 * x2
            if DX:
                g1, g2 = g1 * w1, g2 * w2
                mean = _mean_product(g1, g2, x1, x2, D)
                g1, g2 = rstd * (g1 - x1 * mean), rstd * (g2 - x2 * mean)
        if DX:
            _store_heads(dx, (token * H + head) * D, mask, g1, g2, D, R, HALF, INTERLEAVED)
    return dw1, dw2


@triton.jit
def _sum_heads(dw):  # (tokens, heads, HALF) -> (1, 1, HALF), in one reduction
    return tl.sum(tl.reshape(dw, [dw.shape[0] * dw.shape[1], dw.shape[2]]), axis=0)[None, None, :]


@triton.jit
def _store_partial(
    partials, row, dw1, dw2, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    start = tl.zeros([1, 1, 1], tl.int32)
    _store_heads(
        partials + row * D, start, start == 0, _sum_heads(dw1), _sum_heads(dw2), D, R, HALF, INTERLEAVED
    )  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def _qk_norm_rope_bwd_kernel(
    dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, positions, dq, dk, partials,
    dq_out_stride_b, dq_out_stride_t, dq_out_stride_h, dk_out_stride_b, dk_out_stride_t, dk_out_stride_h,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    cos_stride, sin_stride, positions_stride_b, positions_stride_t, T, NUM_TOKENS, S,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    DQ: tl.constexpr, DK: tl.constexpr, DQ_WEIGHT: tl.constexpr, DK_WEIGHT: tl.constexpr,
):  # fmt: skip
    # Sums of dw stay spread over the tile until the end: one reduction across lanes per program, not per tile.
    dqw1 = tl.zeros([TOKENS, HEADS, HALF], tl.float32)
    dqw2 = tl.zeros([TOKENS, HEADS, HALF], tl.float32)
    dkw1 = tl.zeros([TOKENS, HEADS, HALF], tl.float32)
    dkw2 = tl.zeros([TOKENS, HEADS, HALF], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(NUM_TOKENS, TOKENS), tl.num_programs(0)):
        token = (tile * TOKENS + tl.arange(0, TOKENS))[:, None, None]
        inside = token < NUM_TOKENS
        batch, step = (token // T).to(tl.int64), (token % T).to(tl.int64)
        token = token.to(tl.int64)
        c, s = _load_tables(
            cos, sin, cos_stride, sin_stride, positions, positions_stride_b, positions_stride_t,
            batch, step, inside, S, R, HALF, POSITIONS,
        )  # fmt: skip
        if DQ or DQ_WEIGHT:
            dqw1, dqw2 = _backward_heads(
                dq_out, batch * dq_out_stride_b + step * dq_out_stride_t, dq_out_stride_h,
                q, batch * q_stride_b + step * q_stride_t, q_stride_h,
                q_weight, dq, dqw1, dqw2, token, inside, c, s, EPS,
                HQ, HEADS, D, R, HALF, INTERLEAVED, Q_NORM, DQ, DQ_WEIGHT,
            )  # fmt: skip
        if DK or DK_WEIGHT:
            dkw1, dkw2 = _backward_heads(
                dk_out, batch * dk_out_stride_b + step * dk_out_stride_t, dk_out_stride_h,
                k, batch * k_stride_b + step * k_stride_t, k_stride_h,
                k_weight, dk, dkw1, dkw2, token, inside, c, s, EPS,
                HK, HEADS, D, R, HALF, INTERLEAVED, K_NORM, DK, DK_WEIGHT,
            )  # fmt: skip
    row = tl.program_id(0)
    if DQ_WEIGHT:
        _store_partial(partials, row, dqw1, dqw2, D, R, HALF, INTERLEAVED)
        row += tl.num_programs(0)
    if DK_WEIGHT:
        _store_partial(partials, row, dkw1, dkw2, D, R, HALF, INTERLEAVED)


@triton.jit
def _sum_partials_kernel(
    partials, dq_weight, dk_weight, P, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DQ_WEIGHT: tl.constexpr, DK_WEIGHT: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = col < D
    if DQ_WEIGHT:
        total = _sum_rows(partials, P, col, inside, D, ROWS, COLS)
        tl.store(dq_weight + col, total.to(dq_weight.dtype.element_ty), mask=inside)
        partials += P * D
    if DK_WEIGHT:
        total = _sum_rows(partials, P, col, inside, D, ROWS, COLS)
        tl.store(dk_weight + col, total.to(dk_weight.dtype.element_ty), mask=inside)


@triton.jit
def _sum_rows(partials, P, col, inside, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, P, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        total += tl.load(partials + row * D + col[None, :], mask=(row < P) & inside[None, :], other=0.0)
    return tl.sum(total, axis=0)


def _layout(Hq: int, Hk: int, D: int, R: int, interleaved: bool, tile: int) -> dict[str, Any]:
    """How heads are cut into tiles: TOKENS x HEADS heads, each of HALF pairs (padded)."""
    half = triton.next_power_of_2(triton.cdiv(D, 2))
    rows = max(1, tile // (2 * half))
    # q and k share one HEADS, so that cos and sin are laid out over lanes once. The largest that pads few lanes.
    heads = min(_MAX_HEADS, rows)
    while heads > 1 and 4 * heads * (triton.cdiv(Hq, heads) + triton.cdiv(Hk, heads)) > 5 * (Hq + Hk):
        heads //= 2
    return dict(HQ=Hq, HK=Hk, D=D, R=R, TOKENS=rows // heads, HEADS=heads, HALF=half, INTERLEAVED=interleaved)


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, ...]:  # of batch, tokens and heads
    if x is None:
        return 0, 0, 0
    # The stride of a dimension of size 1 means nothing and may be odd, which would forbid 128-bit accesses.
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))


def _position_strides(positions: Tensor | None) -> tuple[int, int]:
    if positions is None:
        return 0, 0
    return (0 if positions.dim() == 1 else positions.stride(0)), positions.stride(-1)


def _forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None, eps: float, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_out, k_out = empty_like_contiguous(q), empty_like_contiguous(k)
    (B, T, Hq, D), Hk = q.shape, k.shape[2]
    if q.numel() + k.numel() == 0:
        return q_out, k_out
    q, k, cos, sin = map(_last_contiguous, (q, k, cos, sin))
    layout = _layout(Hq, Hk, D, 2 * cos.shape[1], interleaved, _FORWARD_TILE)
    _qk_norm_rope_fwd_kernel[(triton.cdiv(B * T, layout["TOKENS"]),)](
        *(q, k, _contiguous(q_weight), _contiguous(k_weight), cos, sin, positions, q_out, k_out),
        *(*_strides(q), *_strides(k), cos.stride(0), sin.stride(0), *_position_strides(positions)),
        *(T, B * T, cos.shape[0]),
        **layout,
        EPS=eps,
        POSITIONS=positions is not None,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        num_warps=warps(_THREADS, cos.device),
    )
    return q_out, k_out


def _backward(
    dq_out: Tensor | None, dk_out: Tensor | None, q: Tensor | None, k: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    eps: float, interleaved: bool, wanted: Sequence[bool],  # gradients of q, k, q_weight, k_weight
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grads = _empty_grads(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, positions, eps, interleaved, wanted)
    like = dq_out if dq_out is not None else dk_out
    if like is None:
        return grads
    B, T, _, D = like.shape
    Hq, Hk = (0 if dout is None else dout.shape[2] for dout in (dq_out, dk_out))
    if B * T * (Hq + Hk) == 0:
        for dweight in grads[2:]:
            dweight.zero_()
        return grads
    dq_out, dk_out, q, k = (None if x is None else _last_contiguous(x) for x in (dq_out, dk_out, q, k))
    cos, sin = _last_contiguous(cos), _last_contiguous(sin)
    dq, dk, dq_weight, dk_weight = grads
    layout = _layout(Hq, Hk, D, 2 * cos.shape[1], interleaved, _BACKWARD_TILE)
    num_tiles = triton.cdiv(B * T, layout["TOKENS"])
    P = min(num_tiles, _BACKWARD_PROGRAMS_PER_SM * multiprocessor_count(cos.device))
    num_weights = wanted[2] + wanted[3]
    partials = torch.empty((num_weights, P, D), dtype=torch.float32, device=cos.device)
    _qk_norm_rope_bwd_kernel[(P,)](
        *(dq_out, dk_out, q, k, _contiguous(q_weight), _contiguous(k_weight), cos, sin, positions, dq, dk, partials),
        *(*_strides(dq_out), *_strides(dk_out), *_strides(q), *_strides(k)),
        *(cos.stride(0), sin.stride(0), *_position_strides(positions), T, B * T, cos.shape[0]),
        **layout,
        EPS=eps,
        POSITIONS=positions is not None,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        DQ=wanted[0],
        DK=wanted[1],
        DQ_WEIGHT=wanted[2],
        DK_WEIGHT=wanted[3],
        num_warps=warps(_THREADS, cos.device),
    )
    if num_weights:
        cols = min(32, triton.next_power_of_2(D))
        _sum_partials_kernel[(triton.cdiv(D, cols),)](
            *(partials, dq_weight, dk_weight, P),
            D=D,
            ROWS=128,
            COLS=cols,
            DQ_WEIGHT=wanted[2],
            DK_WEIGHT=wanted[3],
            num_warps=warps(_THREADS, cos.device),
        )
    return grads


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _empty_grads(
    dq_out: Tensor | None, dk_out: Tensor | None, q: Tensor | None, k: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    eps: float, interleaved: bool, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = (dq_out, dk_out, q_weight, k_weight)
    dq, dk, dq_weight, dk_weight = (
        empty_like_contiguous(x) if want and x is not None else cos.new_empty(0)
        for x, want in zip(like, wanted, strict=True)
    )
    return dq, dk, dq_weight, dk_weight


def _forward_cpu(
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
            f"{_OP}: positions{list(index)} is {positions[index].item()}, outside of the {S} rows of cos and sin; make "
            f"the tables longer or check the positions"
        )


def _backward_cpu(
    dq_out: Tensor | None, dk_out: Tensor | None, q: Tensor | None, k: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    eps: float, interleaved: bool, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dq_weight = _gradient_cpu(dq_out, q, q_weight, cos, sin, positions, eps, interleaved, wanted[0], wanted[2])
    dk, dk_weight = _gradient_cpu(dk_out, k, k_weight, cos, sin, positions, eps, interleaved, wanted[1], wanted[3])
    return dq, dk, dq_weight, dk_weight


def _gradient_cpu(
    dout: Tensor | None, x: Tensor | None, weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None, eps: float, interleaved: bool, want_dx: bool, want_dweight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx, dweight = cos.new_empty(0), cos.new_empty(0)
    if dout is None or not (want_dx or want_dweight):
        return dx, dweight
    cos, sin = _table_rows(cos, positions, dout.shape[1]), _table_rows(sin, positions, dout.shape[1])
    g = _rotate(wide(dout), cos, -sin, interleaved)
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


_qk_norm_rope_backward = register(
    "qk_norm_rope_backward(Tensor? dq_out, Tensor? dk_out, Tensor? q, Tensor? k, Tensor? q_weight, Tensor? k_weight, "
    "Tensor cos, Tensor sin, Tensor? positions, float eps, bool interleaved, bool[4] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    triton=_backward,
    cpu=_backward_cpu,
    fake=_empty_grads,
)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, q_weight, k_weight, cos, sin, positions, eps, interleaved = inputs
    needs_q, needs_k, needs_q_weight, needs_k_weight = ctx.needs_input_grad[:4]
    # A rotation alone is linear: its gradient does not need x.
    keeps_q = q_weight is not None and (needs_q or needs_q_weight)
    keeps_k = k_weight is not None and (needs_k or needs_k_weight)
    ctx.save_for_backward(q if keeps_q else None, k if keeps_k else None, q_weight, k_weight, cos, sin, positions)
    ctx.eps, ctx.interleaved = eps, interleaved
    ctx.set_materialize_grads(False)
    trained = (needs_q or needs_q_weight, needs_k or needs_k_weight)
    ctx.mark_non_differentiable(*(out for out, needed in zip(output, trained, strict=True) if not needed))


def _gradients(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    # An output that nobody used comes without a gradient, and gives none to its inputs.
    wanted = [needs[i] and dout is not None for i, dout in enumerate((dq_out, dk_out, dq_out, dk_out))]
    if not any(wanted):
        return (None,) * 9
    grads = _qk_norm_rope_backward(dq_out, dk_out, *ctx.saved_tensors, ctx.eps, ctx.interleaved, wanted)
    return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), *(None,) * 5


_qk_norm_rope = register(
    "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? positions, "
    "float eps, bool interleaved) -> (Tensor, Tensor)",
    triton=_forward,
    cpu=_forward_cpu,
    fake=lambda q, k, *_: (empty_like_contiguous(q), empty_like_contiguous(k)),
    backward=_gradients,
    setup_context=_save_inputs,
)


def qk_norm_rope(
    q: Tensor,  # (B, T, Hq, D), any strides: a view of a packed QKV projection is not copied
    k: Tensor,  # (B, T, Hk, D)
    q_weight: Tensor | None,  # (D,); None: rotary without norm
    k_weight: Tensor | None,  # (D,)
    cos: Tensor,  # (S, R/2) with R <= D: dimensions from R on are only normalised
    sin: Tensor,  # (S, R/2)
    *,
    positions: Tensor | None = None,  # (B, T) or (T,), the row of cos and sin for each token; None: 0 to T-1
    eps: float = 1e-6,
    interleaved: bool = False,  # pairs (2i, 2i+1) instead of (i, i + R/2)
) -> tuple[Tensor, Tensor]:  # (B, T, Hq, D), (B, T, Hk, D), contiguous
    """RMSNorm of every head of q and k, then rotary embedding, in one pass.

    A position outside of the tables is an error on the CPU. A GPU cannot raise one without a synchronisation: there the
    token's rotated dimensions become NaN.
    """
    _check(q, k, q_weight, k_weight, cos, sin, positions)
    return _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, positions, eps, interleaved)


def _check(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None,
) -> None:  # fmt: skip
    check_tensors(_OP, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"{_OP}: q {shape(q)} and k {shape(k)} must be (batch, tokens, heads, head_dim)")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{_OP}: q {shape(q)} and k {shape(k)} must agree in all but the number of heads")
    if q.dtype != k.dtype:
        raise TypeError(f"{_OP}: q is {q.dtype} and k {k.dtype}; cast them to one dtype")
    B, T, _, D = q.shape
    if D > _MAX_HEAD_DIM:
        raise ValueError(f"{_OP}: head_dim ({D}) is above the supported {_MAX_HEAD_DIM}; use {_OP}_reference")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (D,):
            raise ValueError(f"{_OP}: {name} {shape(weight)} must be ({D},), one weight for each dimension of a head")
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(
            f"{_OP}: cos {shape(cos)} and sin {shape(sin)} must both be (positions, rotary_dim / 2); "
            f"rotary_table makes them"
        )
    if not 1 <= cos.shape[1] <= D // 2:
        raise ValueError(
            f"{_OP}: cos {shape(cos)} rotates {2 * cos.shape[1]} dimensions, but a head has {D}; the tables hold each "
            f"angle once: (positions, rotary_dim / 2)"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{_OP}: {name} requires grad, but the tables get no gradient here; pass {name}.detach()")
    if positions is None:
        if cos.shape[0] < T:
            raise ValueError(f"{_OP}: cos and sin have {cos.shape[0]} rows for {T} tokens; make the tables longer")
        return
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{_OP}: positions has dtype {positions.dtype}; supported are int32 and int64")
    if shape(positions) not in ((T,), (B, T)):
        raise ValueError(f"{_OP}: positions {shape(positions)} must be {(T,)} or {(B, T)}")
    if positions.device != q.device:
        raise ValueError(f"{_OP}: q is on {q.device} and positions on {positions.device}; move them to one device")
