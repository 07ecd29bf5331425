"""Tiles of rows between global memory and a kernel, and the logits that both directions compute from them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_pointers(base, start, stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    # Where the tile begins may lie beyond 2^31 elements; within the tile 32 bits do (layout.addressable).
    base += tl.cast(start, tl.int64) * stride
    return base + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_rows(
    base, start, stride, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Rows of D elements, padded with zeros to BLOCK_D. If MASKED, rows from `limit` on are zeros."""
    pointers = row_pointers(base, start, stride, ROWS, BLOCK_D)
    row = start + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    if MASKED and D < BLOCK_D:
        return tl.load(pointers, mask=(row < limit)[:, None] & (column < D)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=(row < limit)[:, None], other=0.0)
    elif D < BLOCK_D:
        return tl.load(pointers, mask=(column < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(value, base, start, stride, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Round and store the rows before `limit`."""
    pointers = row_pointers(base, start, stride, ROWS, BLOCK_D)
    row = start + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    tl.store(pointers, value.to(base.dtype.element_ty), mask=(row < limit)[:, None] & (column < D)[None, :])


@triton.jit
def capped(s, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """q.k, or with a softcap tanh(scale * q.k / softcap): what `base2_factor` turns into the logit in units of ln 2."""
    if SOFTCAP > 0:
        s = libdevice.tanh(s * (SCALE / SOFTCAP))
    return s


@triton.jit
def base2_factor(SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0:
        return SOFTCAP * LOG2E
    else:
        return SCALE * LOG2E
