"""Loads and stores of tiles of rows, and the matmuls between tiles."""

from __future__ import annotations

from fasttrain_kernels._triton import tl, triton


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
def inverse_sum_offset(num_heads, lse_head):
    """The distance between the two numbers that float32 keeps of a row in lse.

    Computed, because one more argument, though 16 bits have no use for it, costs 14 registers at D=64 on sm_90.
    """
    return tl.cast(num_heads, tl.int64) * lse_head


@triton.jit
def matmul_transposed(a, b):
    """a b^T. A single row in a or b (float32 only) is summed as a tree, which rounds log2(D) times instead of D."""
    if a.shape[0] == 1:
        return tl.sum(a * b, 1)[None, :]
    elif b.shape[0] == 1:
        return tl.sum(a * b, 1)[:, None]
    else:
        return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def matmul_add(acc, a, b, EXACT: tl.constexpr):
    """acc + a b.

    float32: the sum over a block first. In one chain of additions over the whole sequence, every term would be rounded
    at the size of the total. tl.fma, because the compiler turns `+` into that chain.
    """
    if a.shape[0] == 1:
        return acc + tl.sum(tl.trans(a) * b, 0)[None, :]
    elif b.shape[0] == 1:
        return tl.fma(acc, 1.0, a * b)
    elif EXACT:
        return tl.fma(acc, 1.0, tl.dot(a, b, input_precision="ieee"))
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
