"""Tiles of rows: masks and padding of loads and stores, and matmuls of a single row."""

import pytest
import torch
import triton
import triton.language as tl

from fasttrain_kernels.ops.attention.tile_ops import load_rows, matmul_add, matmul_transposed, store_rows
from fasttrain_kernels.testing import interpret


@triton.jit
def copy_kernel(x, y, start, stride, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    tile = load_rows(x, start, stride, limit, ROWS, D, BLOCK_D, True)
    store_rows(tile, y, start, stride, limit, ROWS, D, BLOCK_D)


@pytest.mark.parametrize(("D", "block_d"), [(16, 16), (11, 16)])
def test_rows_beyond_the_limit_are_neither_read_nor_written(D, block_d):
    x, y = torch.randn(6, D), torch.zeros(6, D)
    with interpret() as launches:
        copy_kernel[(1,)](x, y, 3, D, 6, ROWS=8, D=D, BLOCK_D=block_d)
    assert torch.equal(y[3:], x[3:])
    assert (y[:3] == 0).all()
    assert launches.moved == 2 * x[3:].nbytes


@triton.jit
def matmul_kernel(a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr):
    left = load_rows(a, 0, K, M, M, K, K, False)
    right = load_rows(b, 0, K, N, N, K, K, False)
    scores = matmul_transposed(left, right)
    values = load_rows(c, 0, K, N, N, K, K, False)
    total = matmul_add(tl.zeros((M, K), tl.float32), scores, values, EXACT)
    store_rows(total, out, 0, K, M, M, K, K)


@pytest.mark.parametrize(("M", "N", "exact"), [(16, 16, True), (16, 16, False), (1, 16, True), (16, 1, True)])
def test_matmuls_of_tiles_and_of_a_single_row(M, N, exact):
    a, b, c, out = torch.randn(M, 32), torch.randn(N, 32), torch.randn(N, 32), torch.empty(M, 32)
    with interpret():
        matmul_kernel[(1,)](a, b, c, out, M=M, N=N, K=32, EXACT=exact)
    torch.testing.assert_close(out, a @ b.T @ c, rtol=1e-4, atol=1e-4)
