"""Rewritten functions: loops, device functions, defaults and constexpr."""

import torch
import triton
import triton.language as tl

from fasttrain_kernels.testing import interpret


@triton.constexpr_function
def halved(n):
    return n // 2


@triton.jit
def helper(x, factor: tl.constexpr = 3):
    return x * factor


SCALE: tl.constexpr = tl.constexpr(2.0)


@triton.jit
def language_kernel(x, y, weight, n, flag: tl.constexpr, BLOCK: tl.constexpr = 8):
    HALF: tl.constexpr = halved(BLOCK)
    tl.static_assert(HALF == 4, "halved")
    total = tl.zeros([HALF], tl.float32)
    for start in tl.range(0, n, HALF, num_stages=2, warp_specialize=False):
        tl.device_assert(start < n, "start")
        total += tl.load(x + start.to(tl.int64) + tl.arange(0, HALF))
    for k in tl.static_range(2):
        total += k
    steps = 0
    while steps < 3:
        steps += 1
    if weight is not None:
        total *= 1000.0
    if flag:
        total = helper(total) * SCALE + helper(total, factor=1)
    total, steps = total + steps, 0
    tl.store(y + tl.arange(0, HALF), total * max(min(n, 5), 1))


def test_loops_device_functions_defaults_and_constexpr_functions():
    x, y = torch.arange(8.0), torch.empty(4)
    with interpret():
        language_kernel[(1,)](x, y, None, 8, flag=True)
    assert torch.equal(y, ((x[:4] + x[4:] + 1) * 7 + 3) * 5)
