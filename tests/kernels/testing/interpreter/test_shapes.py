"""Shapes of tiles."""

import torch
import triton
import triton.language as tl

from fasttrain_kernels.testing import interpret


@triton.jit
def shapes_kernel(x, y):
    i = tl.arange(0, 64)
    tile = tl.reshape(tl.load(x + i), (2, 4, 8))
    tile = tl.permute(tile, (2, 0, 1))  # (8, 2, 4)
    even, odd = tl.split(tl.reshape(tile, (8, 2, 2, 2)))
    joined = tl.join(odd, even)  # pairs swapped
    flat = tl.reshape(tl.cumsum(tl.reshape(joined, (8, 8)), axis=1), (64,))
    tl.store(y + i, flat)


def test_reshape_permute_split_join_and_cumsum_on_four_dimensional_tiles():
    x, y = torch.randn(64), torch.empty(64)
    with interpret():
        shapes_kernel[(1,)](x, y)
    pairs = x.view(2, 4, 8).permute(2, 0, 1).reshape(8, 4, 2).flip(-1)
    torch.testing.assert_close(y, pairs.reshape(8, 8).cumsum(1).view(64))
