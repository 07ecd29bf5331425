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

    reference.py  the specification, and the rotary tables
    kernels.py    the Triton kernels
    launch.py     tiles, grids and launches
    cpu.py        the CPU implementation
    op.py         the torch ops and the public function
"""
