import pytest
import torch
import triton
import triton.language as tl
from triton.language import load

from fasttrain_kernels.testing import KernelError, interpret


@triton.jit
def members_kernel(x, flags, y, stride):
    i = tl.arange(0, 8)
    value = load(x + tl.multiple_of(stride, 16) + i)
    tl.store(y, value.sum() + value.max(0) + value.to(tl.int32).argmax(0))
    tl.store(y + 1, tl.where(load(flags + i), value, 0.0).sum())
    tl.store(flags + i, value > 3)


def test_methods_names_imported_from_tl_booleans_and_hints():
    x, flags, y = torch.arange(24.0), torch.arange(8) % 2 == 0, torch.empty(2)
    with interpret():
        members_kernel[(1,)](x, flags, y, 16)
        with pytest.raises(KernelError, match=r"tl.multiple_of: 8 is not a multiple of 16"):
            members_kernel[(1,)](x, flags, y, 8)
    assert y.tolist() == [x[16:].sum() + 23 + 7, 16 + 18 + 20 + 22]
    assert flags.all()


@triton.jit
def assert_kernel(x, LIMIT: tl.constexpr):
    tl.static_assert(LIMIT < 4, "LIMIT is too large")
    tl.device_assert(tl.load(x + tl.program_id(0)) > 0, "x must be positive")


def test_assertions_act_and_name_kernel_program_and_cause():
    x = torch.tensor([1.0, 2.0, -1.0])
    with interpret():
        with pytest.raises(KernelError, match=r"assert_kernel: program \(2, 0, 0\): .*x must be positive"):
            assert_kernel[(3,)](x, LIMIT=1)
        with pytest.raises(KernelError, match="LIMIT is too large"):
            assert_kernel[(3,)](x, LIMIT=4)


@triton.autotune([triton.Config({"BLOCK": 16}, num_warps=1), triton.Config({"BLOCK": 32}, num_warps=2)], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, BLOCK + EVEN, mask=i < n)


@pytest.mark.parametrize(("config", "block"), [(0, 16), (1, 32)])
def test_an_autotuned_kernel_runs_the_chosen_configuration(config, block):
    x = torch.empty(48)
    with interpret(config=config) as launches:
        tuned_kernel[lambda meta: (triton.cdiv(48, meta["BLOCK"]),)](x, 48)
    assert x.tolist() == [block + (48 % block == 0)] * 48
    assert launches[0].grid == (48 // block + (48 % block > 0), 1, 1)
    with interpret(config=2), pytest.raises(ValueError, match="config 2 of a kernel with 2 configurations"):
        tuned_kernel[(1,)](x, 48)


@triton.jit
def descriptor_kernel(x, y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    sink = tl.make_tensor_descriptor(y, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    sink.store([i, j], source.load([i, j]) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_descriptors_clip_at_the_edges(dtype):
    x = torch.randn(20, 40).to(dtype)
    y = torch.empty_like(x)
    with interpret() as launches:
        descriptor_kernel[(2, 2)](x, y, 20, 40, BM=16, BN=32)
    assert torch.equal(y, x + 1)
    assert launches.moved == launches.unique == 2 * x.nbytes


@triton.jit
def block_pointer_kernel(x, y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_block_ptr(x, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    sink = tl.make_block_ptr(y, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    for _ in range(0, N, BN):
        tl.store(sink, tl.load(source, boundary_check=(0, 1), padding_option="zero"), boundary_check=(0, 1))
        source, sink = tl.advance(source, (0, BN)), tl.advance(sink, (0, BN))


@pytest.mark.skipif("have been removed" in (tl.make_block_ptr.__doc__ or ""), reason="triton 3.9 has none")
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_block_pointers_advance_and_clip():
    x, y = torch.randn(5, 20), torch.empty(5, 20)
    with interpret():
        block_pointer_kernel[(1,)](x, y, 5, 20, BM=8, BN=8)
    assert torch.equal(y, x)
