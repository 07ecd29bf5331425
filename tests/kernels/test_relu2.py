import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain_kernels import relu2, relu2_reference
from fasttrain_kernels.testing import assert_accurate, interpret

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def eager(x):
    return torch.nn.functional.relu(x).square()


def tensor(*shape, dtype=torch.float32):
    return (torch.randn(shape) * 3).to(dtype).requires_grad_()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows=st.integers(0, 5), features=st.integers(0, 1100), dtype=st.sampled_from(DTYPES))
def test_any_shape_works_empty_ones_too(rows, features, dtype):
    x = tensor(rows, features, dtype=dtype)
    assert_accurate(relu2, relu2_reference, dict(x=x), eager=eager)
    with interpret():
        assert_accurate(relu2, relu2_reference, dict(x=x), eager=eager)


def test_bytes_are_the_limit():
    x = tensor(5, 1000, dtype=torch.bfloat16)
    with interpret() as launches:
        relu2(x).backward(torch.randn(5, 1000).bfloat16())
    assert [launch.moved for launch in launches] == [2 * x.nbytes, 3 * x.nbytes]


def test_strides_and_broadcast_gradients():
    packed = tensor(4, 6, 40)
    with interpret():
        for function in (relu2, relu2_reference):
            (grad,) = torch.autograd.grad(function(packed[..., 8:]).square().sum(), packed)
            torch.testing.assert_close(grad, 4 * packed.detach().relu() ** 3 * (torch.arange(40) >= 8))
        x = tensor(3, 63)
        relu2(x).sum().backward()  # a gradient of stride 0
    torch.testing.assert_close(x.grad, 2 * x.detach().relu())


def test_opcheck_and_errors():
    from fasttrain_kernels.ops.relu2 import _relu2, _relu2_backward

    x = tensor(3, 63)
    torch.library.opcheck(_relu2, (x,))
    torch.library.opcheck(_relu2_backward, (torch.randn(3, 63), x.detach()))
    with pytest.raises(TypeError, match="relu2: x has dtype torch.int64; supported are float32, bfloat16 and float16"):
        relu2(torch.ones(3, dtype=torch.int64))
    (dx,) = torch.autograd.grad(relu2(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="^relu2_backward: the gradient of this op is not implemented"):
        dx.sum().backward()
