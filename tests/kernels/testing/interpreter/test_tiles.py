"""Tiles."""

import pytest
import torch
import triton
import triton.language as tl

from fasttrain_kernels.testing import KernelError, interpret


@triton.jit
def arange_kernel(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 0.0)


def test_a_tile_that_is_no_power_of_two_is_an_error():
    with interpret(), pytest.raises(KernelError, match="power of 2"):
        arange_kernel[(1,)](torch.empty(12), N=12)
