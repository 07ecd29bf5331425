import pytest
import torch

from fasttrain_kernels import swiglu, swiglu_reference
from fasttrain_kernels.testing import assert_accurate, interpret

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed_reference(gate: torch.Tensor) -> torch.Tensor:
    return swiglu_reference(*gate.chunk(2, dim=-1))


def eager(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape) * 3).to(dtype).requires_grad_()  # * 3: outliers that saturate the sigmoid


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 3, 1000), (2, 1025), (64,)])
def test_kernel_is_as_accurate_as_eager(shape, dtype):
    with interpret():
        assert_accurate(
            swiglu,
            swiglu_reference,
            dict(gate=tensor(*shape, dtype=dtype), up=tensor(*shape, dtype=dtype)),
            eager=eager,
        )
