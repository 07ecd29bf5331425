import math

import pytest
import torch
import triton
import triton.language as tl

from fasttrain_kernels.testing import KernelError, interpret

NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def cast_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def arithmetic_kernel(x, y, z, n, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n)
    b = tl.load(y + i, mask=i < n)
    tl.store(z + i, a * b + a * 2.0 - b / scale.to(tl.float32), mask=i < n)


@pytest.mark.parametrize("dtype", NARROW)
def test_casts_round_to_nearest_even_as_torch_does(dtype):
    x = torch.randn(1000) * torch.logspace(-8, 1, 1000)
    down, up = torch.empty(1000, dtype=dtype), torch.empty(1000)
    with interpret():
        cast_kernel[(4,)](x, down, 1000, BLOCK=256)
        cast_kernel[(4,)](down, up, 1000, BLOCK=256)
    assert torch.equal(down.float(), x.to(dtype).float())
    assert torch.equal(up, x.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_arithmetic_rounds_in_the_dtype_of_its_operands(dtype):
    x, y = torch.randn(100).to(dtype), torch.randn(100).to(dtype)
    z = torch.empty_like(x)
    with interpret():
        arithmetic_kernel[(1,)](x, y, z, 100, 0.5, BLOCK=128)
    expected = ((x * y + x * 2).float() - y.float() / 0.5).to(dtype)  # Triton divides narrow floats in float32
    assert torch.equal(z, expected)


@triton.jit
def dot_kernel(a, b, c, K: tl.constexpr, PRECISION: tl.constexpr):
    m, n, k = tl.arange(0, 16), tl.arange(0, 32), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * 32 + n[None, :])
    result = tl.dot(left, right, input_precision=PRECISION)
    tl.store(c + m[:, None] * 32 + n[None, :], result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_matmuls_accumulate_in_float32(dtype):
    a, b, c = torch.randn(16, 64).to(dtype), torch.randn(64, 32).to(dtype), torch.empty(16, 32)
    with interpret() as launches:
        dot_kernel[(1,)](a, b, c, K=64, PRECISION="ieee")
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
    assert launches.flops == 2 * 16 * 32 * 64


def test_float32_matmuls_are_tf32_unless_they_ask_for_ieee():
    a, b, c = torch.randn(16, 64), torch.randn(64, 32), torch.empty(16, 32)

    def error(precision, **options):
        with interpret(**options):
            dot_kernel[(1,)](a, b, c, K=64, PRECISION=precision)
        return (c - a @ b).abs().max().item()

    assert error("ieee") < 1e-5
    assert 1e-4 < error("tf32") < 1e-1
    assert error("tf32", tf32=False) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matmul_does_not_depend_on_which_operand_is_transposed(dtype):
    """Kernels recompute a matmul in backward and subtract what forward made of it."""
    a, b = (torch.randn(32, 64).to(dtype) for _ in range(2))
    matmuls = torch.empty(2, 32, 32)
    with interpret():
        dot_kernel[(1,)](a, b.T.contiguous(), matmuls[0], K=64, PRECISION="ieee")
        dot_kernel[(1,)](b, a.T.contiguous(), matmuls[1], K=64, PRECISION="ieee")
    assert torch.equal(matmuls[0, :16, :16], matmuls[1, :16, :16].T)  # the kernel computes 16 rows


def test_a_matmul_smaller_than_tensor_cores_take_is_an_error():
    a, b, c = torch.randn(16, 8), torch.randn(8, 32), torch.empty(16, 32)
    with interpret(), pytest.raises(KernelError, match="K >= 16"):
        dot_kernel[(1,)](a, b, c, K=8, PRECISION="ieee")


@triton.jit
def atomic_kernel(x, total, counts, BLOCK: tl.constexpr):
    value = tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(total + tl.arange(0, BLOCK) % 2, value)
    tl.atomic_max(counts, tl.program_id(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_atomics_see_every_lane_and_are_no_race(dtype):
    x = torch.randint(-4, 4, (4, 16)).to(dtype)
    total, count = torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    with interpret() as launches:
        atomic_kernel[(4,)](x, total, count, BLOCK=16)
    assert torch.equal(total, x.reshape(-1, 2).sum(0))
    assert count.item() == 3
    traffic = launches[0].arguments["total"]
    assert (traffic.atomic, traffic.unique) == (64 * dtype.itemsize, 2 * 2 * dtype.itemsize)


@triton.jit
def nan_kernel(x, y):
    i = tl.arange(0, 4)
    a = tl.load(x + i)
    tl.store(y + i, tl.maximum(a, 0.0))
    tl.store(y + 4, tl.max(a, 0))
    tl.store(y + 5 + i, tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL))


def test_maximum_ignores_nan_as_the_hardware_does():
    x, y = torch.tensor([math.nan, -1.0, 2.0, 1.0]), torch.empty(9)
    with interpret():
        nan_kernel[(1,)](x, y)
    assert y[:5].tolist() == [0, 0, 2, 1, 2]
    assert y[5].isnan()
