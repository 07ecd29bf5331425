"""Counts of a launch."""

import torch
import triton
import triton.language as tl

from fasttrain_kernels.testing import Launch, interpret


@triton.jit
def copy_kernel(x, y, n, x_stride, BLOCK: tl.constexpr, MASKED: tl.constexpr = True):
    i = tl.arange(0, BLOCK)
    inside = (i < n) | (not MASKED)
    row = tl.program_id(0)
    tl.store(y + row * n + i, tl.load(x + row * x_stride + i, mask=inside), mask=i < n)


def test_bytes_count_lanes_that_are_not_masked_per_argument_and_distinct_ones_once():
    row, y = torch.randn(100).bfloat16(), torch.empty(3, 100, dtype=torch.bfloat16)
    with interpret() as launches:
        copy_kernel[(3,)](row.expand(3, 100), y, 100, 0, BLOCK=128)
    launch = launches[0]
    assert isinstance(launch, Launch)
    assert (launch.kernel, launch.grid, launch.loaded, launch.stored, launch.atomic) == (
        "copy_kernel",
        (3, 1, 1),
        600,
        600,
        0,
    )
    assert (launch.moved, launch.unique, launch.arguments["x"].unique, launches.moved) == (1200, 800, 200, 1200)
    assert torch.equal(y, row.expand(3, 100))
    assert "copy_kernel (3, 1, 1): moved 1,200 B, unique 800 B" in str(launches)


@triton.jit
def arithmetic_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i)
    total = tl.sum(a * a + 1.0, axis=0)  # 2 BLOCK, and BLOCK - 1 for the sum
    tl.store(y + i, tl.maximum(tl.fma(a, a, a), 0.0) / total)  # 3 BLOCK, and BLOCK for the division


def test_elementwise_operations_of_floats_are_counted_and_those_of_addresses_are_not():
    with interpret() as launches:
        arithmetic_kernel[(1,)](torch.ones(64), torch.empty(64), BLOCK=64)
    assert launches.elementwise == 7 * 64 - 1
    assert "0 dot FLOP, 447 elementwise, 0 special" in str(launches)
