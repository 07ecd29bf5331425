"""Special functions and libdevice."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.libdevice import tanh

from fasttrain_kernels.testing import interpret


@triton.jit
def special_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=1.0)
    value = tl.exp(a) + tl.log(a) + tl.sqrt(a) + tl.rsqrt(a) + tl.sin(a) + tl.cos(a) + tl.exp2(a) + tl.log2(a)
    value += tl.sigmoid(a) + tl.erf(a) + tanh(a) + libdevice.pow(a, a) + libdevice.log1p(a)
    tl.store(y + i, value, mask=i < n)


def test_special_functions_and_libdevice_are_right_and_counted():
    x, y = torch.rand(50) + 0.1, torch.empty(50)
    with interpret() as launches:
        special_kernel[(1,)](x, y, 50, BLOCK=64)
    d = x.double()
    expected = d.exp() + d.log() + d.sqrt() + d.rsqrt() + d.sin() + d.cos() + d.exp2() + d.log2()
    expected += d.sigmoid() + d.erf() + d.tanh() + d.pow(d) + d.log1p()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert launches.special == 13 * 64
