"""Arguments as Triton's JIT types them."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fasttrain_kernels.testing import interpret


@triton.jit
def arguments_kernel(pair, y, flag, wide: tl.int64, half: tl.float16, seed):
    i = tl.arange(0, 8)
    total = tl.load(pair[0] + i) + tl.load(pair[1] + i)
    if flag:
        total += half
    tl.store(y + i, total + wide * 2)
    tl.store(y + 8 + i, tl.rand(seed, i).to(y.dtype.element_ty))


def test_arguments_have_the_types_that_the_jit_gives_them():
    a, b, y = torch.randn(8).double(), torch.randn(8).double(), torch.empty(16, dtype=torch.float64)
    with interpret() as launches:
        arguments_kernel[(1,)]((a, b), y, True, 2**40, 0.1, 7, num_warps=4, waves_per_eu=2)
        with pytest.raises(TypeError, match="arguments_kernel: num_wraps is neither a parameter"):
            arguments_kernel[(1,)]((a, b), y, True, 2**40, 0.1, 7, num_wraps=4)
        with pytest.raises(ValueError, match=r"arguments_kernel: pair\[1\] is on meta"):
            arguments_kernel[(1,)]((a, b.to("meta")), y, True, 2**40, 0.1, 7)
    torch.testing.assert_close(y[:8], a + b + float(np.float16(0.1)) + 2.0**41)
    assert ((y[8:] >= 0) & (y[8:] < 1)).all()
    assert list(launches[0].arguments) == ["pair[0]", "pair[1]", "y"]
