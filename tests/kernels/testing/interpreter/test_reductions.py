"""tl.reduce and tl.associative_scan."""

import torch
import triton
import triton.language as tl

from fasttrain_kernels.testing import interpret


@triton.jit
def welford(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    delta = mean_b - mean_a
    count = count_a + count_b
    return mean_a + delta * count_b / count, m2_a + m2_b + delta * delta * count_a * count_b / count, count


@triton.jit
def reductions_kernel(x, y, AXIS: tl.constexpr):
    i, j = tl.arange(0, 4), tl.arange(0, 8)
    tile = tl.load(x + i[:, None] * 8 + j[None, :])
    _, m2, count = tl.reduce((tile, tile * 0.0, tile * 0.0 + 1.0), 1, welford)
    tl.store(y + i, m2 / count)
    tl.store(y + 4 + i, tl.argmax(tile, AXIS).to(tl.float32))
    tl.store(y + 8 + i, tl.min(tile, 1))
    tl.store(y + 12, tl.sum(tile))
    highest = tl.sum(tile, 1, keep_dims=True) * tl.sum(tile, axis=0, keep_dims=True)
    tl.store(y + 13, tl.max(tl.max(highest, 1), 0))
    tl.store(y + 16 + i[:, None] * 8 + j[None, :], tl.sort(tile))


def test_reductions_of_tuples_ties_and_sorting():
    x, y = torch.randn(4, 8), torch.empty(48)
    with interpret():
        reductions_kernel[(1,)](x, y, AXIS=1)
    torch.testing.assert_close(y[:4], x.var(1, correction=0))
    assert torch.equal(y[4:8], x.argmax(1).float())
    assert torch.equal(y[8:12], x.amin(1))
    torch.testing.assert_close(y[12], x.sum())
    torch.testing.assert_close(y[13], (x.sum(1, keepdim=True) * x.sum(0, keepdim=True)).max())
    assert torch.equal(y[16:].view(4, 8), x.sort(1).values)
