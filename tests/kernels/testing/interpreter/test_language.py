import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import load

from fasttrain_kernels.testing import KernelError, interpret


@triton.jit
def shapes_kernel(x, y):
    i = tl.arange(0, 64)
    tile = tl.reshape(tl.load(x + i), (2, 4, 8))
    tile = tl.permute(tile, (2, 0, 1))  # (8, 2, 4)
    even, odd = tl.split(tl.reshape(tile, (8, 2, 2, 2)))
    joined = tl.join(odd, even)  # pairs swapped
    flat = tl.reshape(tl.cumsum(tl.reshape(joined, (8, 8)), axis=1), (64,))
    tl.store(y + i, flat)


def test_reshape_permute_split_join_and_cumsum_on_four_dimensional_tiles():
    x, y = torch.randn(64), torch.empty(64)
    with interpret():
        shapes_kernel[(1,)](x, y)
    pairs = x.view(2, 4, 8).permute(2, 0, 1).reshape(8, 4, 2).flip(-1)
    torch.testing.assert_close(y, pairs.reshape(8, 8).cumsum(1).view(64))


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


@triton.jit
def arange_kernel(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 0.0)


def test_a_tile_that_is_no_power_of_two_is_an_error():
    with interpret(), pytest.raises(KernelError, match="power of 2"):
        arange_kernel[(1,)](torch.empty(12), N=12)


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


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_block_pointers_advance_and_clip():
    x, y = torch.randn(5, 20), torch.empty(5, 20)
    with interpret():
        block_pointer_kernel[(1,)](x, y, 5, 20, BM=8, BN=8)
    assert torch.equal(y, x)


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
