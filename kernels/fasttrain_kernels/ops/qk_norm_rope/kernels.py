"""The Triton kernels: tiles of a few tokens times a few heads times the pairs of a head."""

from __future__ import annotations

from fasttrain_kernels._triton import tl, triton

# One kernel for all lengths
_VARYING = ("length", "num_tokens", "table_rows", "positions_stride_b", "positions_stride_t")


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
    cos, sin, cos_stride, sin_stride, positions, positions_stride_b, positions_stride_t,
    batch, step, inside, table_rows,
    R: tl.constexpr, HALF: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """cos and sin of each token, (tokens, 1, HALF); NaN where its position has no row in the tables."""
    position, known = step, inside
    if POSITIONS:
        at = positions + batch * positions_stride_b + step * positions_stride_t
        position = tl.load(at, mask=inside, other=0).to(tl.int64)
        known = inside & (position >= 0) & (position < table_rows)
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


# 34 arguments: q and k in one launch, which loads cos and sin once; both are views of a projection, with three strides.
@triton.jit(do_not_specialize=_VARYING)
def _qk_norm_rope_fwd_kernel(
    q, k, q_weight, k_weight, cos, sin, positions, q_out, k_out,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    cos_stride, sin_stride, positions_stride_b, positions_stride_t, length, num_tokens, table_rows,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    inside = token < num_tokens
    batch, step = (token // length).to(tl.int64), (token % length).to(tl.int64)
    token = token.to(tl.int64)
    c, s = _load_tables(
        cos, sin, cos_stride, sin_stride, positions, positions_stride_b, positions_stride_t,
        batch, step, inside, table_rows, R, HALF, POSITIONS,
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


# 47 arguments: as in forward, with the gradients of both, and each of the four results only where it is wanted.
@triton.jit(do_not_specialize=_VARYING)
def _qk_norm_rope_bwd_kernel(
    dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, positions, dq, dk, partials,
    dq_out_stride_b, dq_out_stride_t, dq_out_stride_h, dk_out_stride_b, dk_out_stride_t, dk_out_stride_h,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    cos_stride, sin_stride, positions_stride_b, positions_stride_t, length, num_tokens, table_rows,
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
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, TOKENS), tl.num_programs(0)):
        token = (tile * TOKENS + tl.arange(0, TOKENS))[:, None, None]
        inside = token < num_tokens
        batch, step = (token // length).to(tl.int64), (token % length).to(tl.int64)
        token = token.to(tl.int64)
        c, s = _load_tables(
            cos, sin, cos_stride, sin_stride, positions, positions_stride_b, positions_stride_t,
            batch, step, inside, table_rows, R, HALF, POSITIONS,
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
    partials, dq_weight, dk_weight, num_partials, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DQ_WEIGHT: tl.constexpr, DK_WEIGHT: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = col < D
    if DQ_WEIGHT:
        total = _sum_rows(partials, num_partials, col, inside, D, ROWS, COLS)
        tl.store(dq_weight + col, total.to(dq_weight.dtype.element_ty), mask=inside)
        partials += num_partials * D
    if DK_WEIGHT:
        total = _sum_rows(partials, num_partials, col, inside, D, ROWS, COLS)
        tl.store(dk_weight + col, total.to(dk_weight.dtype.element_ty), mask=inside)


@triton.jit
def _sum_rows(partials, num_partials, col, inside, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, num_partials, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        total += tl.load(partials + row * D + col[None, :], mask=(row < num_partials) & inside[None, :], other=0.0)
    return tl.sum(total, axis=0)
