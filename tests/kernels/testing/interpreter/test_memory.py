import pytest
import torch
import triton
import triton.language as tl

from fasttrain_kernels.testing import OutOfBounds, WriteRace, interpret


@triton.jit
def copy_kernel(x, y, n, x_stride, BLOCK: tl.constexpr, MASKED: tl.constexpr = True):
    i = tl.arange(0, BLOCK)
    inside = (i < n) | (not MASKED)
    row = tl.program_id(0)
    tl.store(y + row * n + i, tl.load(x + row * x_stride + i, mask=inside), mask=i < n)


@triton.jit
def locked_add_kernel(total, lock):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total, tl.load(total) + 1.0)
    tl.atomic_xchg(lock, 0)


def test_programs_that_share_elements_behind_a_lock_are_a_race_unless_allowed():
    total, lock = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with interpret(), pytest.raises(WriteRace):
        locked_add_kernel[(4,)](total, lock)
    total.zero_()
    lock.zero_()
    with interpret(locks=True):
        locked_add_kernel[(4,)](total, lock)
    assert total.item() == 4


def test_an_overrun_names_kernel_program_argument_and_index():
    x, y = torch.randn(4, 100), torch.empty(4, 100)
    message = (
        r"^copy_kernel: out-of-bounds load in program \(3, 0, 0\): 28 lane\(s\); first is x\[400\] of 400 elements$"
    )
    with interpret(), pytest.raises(OutOfBounds, match=message):
        copy_kernel[(4,)](x, y, 100, 100, BLOCK=128, MASKED=False)


def test_an_overrun_into_the_neighbouring_tensor_is_caught_by_provenance():
    x, neighbour = torch.randn(200).split(100)
    with interpret(), pytest.raises(OutOfBounds, match=r"x\[100\] of 100 elements"):
        copy_kernel[(1,)](x, neighbour, 100, 100, BLOCK=128, MASKED=False)


def test_leaving_the_columns_of_a_packed_projection_is_caught():
    gate, _ = torch.randn(2, 200).chunk(2, dim=-1)
    with interpret(), pytest.raises(OutOfBounds, match=r"x\[100\], in a gap of the view of shape \(2, 100\)"):
        copy_kernel[(2,)](gate, torch.empty(2, 100), 100, 200, BLOCK=128, MASKED=False)


def test_trap_9_a_row_offset_that_overflows_int32_is_caught():
    """Row 3 of stride 2^30 lies beyond 2^31: 3 * 2^30 is negative in int32."""
    x = torch.empty(3 * 2**30 + 4, dtype=torch.int8).as_strided((4, 4), (2**30, 1))  # untouched pages cost nothing
    with interpret(), pytest.raises(OutOfBounds, match=r"program \(2, 0, 0\): .* x\[-2147483648\]"):
        copy_kernel[(4,)](x, torch.empty(4, 4, dtype=torch.int8), 4, 2**30, BLOCK=4)


@triton.jit
def counter_kernel(x, y, BLOCK: tl.constexpr):
    for row in range(2, 3):
        tl.store(y, tl.load(x + row * BLOCK))


def test_trap_9_a_loop_counter_is_an_int32():
    x = torch.empty(2**31 + 4, dtype=torch.int8)
    with interpret(), pytest.raises(OutOfBounds, match=r"x\[-2147483648\]"):
        counter_kernel[(1,)](x, torch.empty(1, dtype=torch.int8), BLOCK=2**30)


@triton.jit
def wrap_kernel(y, big):
    tl.store(y, big + 1)
    tl.store(y + 1, big * 2)
    tl.store(y + 2, big.to(tl.int64) + 1)
    tl.store(y + 3, -7 // (big - big + 2))


def test_integers_wrap_and_divide_as_on_the_gpu():
    y = torch.empty(4, dtype=torch.int64)
    with interpret():
        wrap_kernel[(1,)](y, 2**31 - 1)
    assert y.tolist() == [-(2**31), -2, 2**31, -3]


@triton.jit
def race_kernel(y, WIDTH: tl.constexpr):
    tl.store(y + tl.program_id(0) * 3 + tl.arange(0, WIDTH), tl.program_id(0))


def test_two_programs_that_store_to_one_element_are_a_race():
    y = torch.empty(8, dtype=torch.int32)
    with interpret():
        race_kernel[(2,)](y, WIDTH=2)
        with pytest.raises(WriteRace, match=r"race_kernel: programs \(0, 0, 0\) and \(1, 0, 0\) both store to y\[3\]"):
            race_kernel[(2,)](y, WIDTH=4)


@triton.jit
def choose_kernel(a, b, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(tl.where(i % 2 == 0, a + i, b + i)))
    tl.store(y.to(tl.pointer_type(tl.int16)) + 2 * BLOCK + i, i.to(tl.int16))


def test_pointers_of_several_origins_and_casts_are_followed():
    a, b, y = torch.arange(4.0), -torch.arange(4.0), torch.empty(6)
    with interpret() as launches:
        choose_kernel[(1,)](a, b, y, BLOCK=4)
        with pytest.raises(OutOfBounds, match="in no argument"):
            choose_kernel[(1,)](a[:2], b[:2], y, BLOCK=4)
    assert y[:4].tolist() == [0, -1, 2, -3]
    assert y[4:].view(torch.int16).tolist() == [0, 1, 2, 3]
    assert launches[0].arguments["a"].loaded == 8
    assert launches[0].arguments["y"].stored == launches[0].arguments["y"].unique == 24


@triton.jit
def order_kernel(y):
    tl.atomic_xchg(y, tl.program_id(0) + 10 * tl.program_id(1))
    tl.atomic_add(y + 1 + tl.program_id(0), 1)


def test_programs_run_in_the_asked_order():
    def last(order):
        y = torch.zeros(4, dtype=torch.int32)
        with interpret(order=order):
            order_kernel[(3, 2)](y)
        assert y[1:].tolist() == [2, 2, 2]
        return y[0].item()

    assert (last(None), last("reverse")) == (12, 0)
    assert len({last(seed) for seed in range(8)}) > 2
    with pytest.raises(ValueError, match="order 'sideways'"):
        last("sideways")


@triton.jit
def partial_kernel(x, y):
    i = tl.arange(0, 4)
    tl.store(y + i, tl.load(x + i, mask=i < 2), mask=i < 3)


def test_uninitialised_memory_and_undefined_lanes_are_nan():
    with interpret():
        y = torch.empty(4, dtype=torch.bfloat16)
        partial_kernel[(1,)](torch.ones(4, dtype=torch.bfloat16), y)
    assert y[:2].tolist() == [1, 1]
    assert y[2:].isnan().all()  # lane 2: loaded without `other`; lane 3: never stored
    with interpret(poison=False):
        assert torch.zeros(1).new_empty(4).shape == (4,)
        partial_kernel[(1,)](torch.ones(4), z := torch.zeros(4))
    assert z.tolist() == [1, 1, 0, 0]


def test_grids_beyond_the_gpus_limits_are_an_error():
    with interpret(), pytest.raises(ValueError, match=r"order_kernel: grid \(1, 65536, 1\) exceeds"):
        order_kernel[(1, 65536)](torch.zeros(2, dtype=torch.int32))


@triton.jit
def misaligned_kernel(x):
    tl.store((x.to(tl.int64) + 2).to(tl.pointer_type(tl.float32)), 1.0)


def test_an_address_between_two_elements_is_an_error():
    with interpret(), pytest.raises(OutOfBounds, match="not multiples of 4 bytes from the start of x"):
        misaligned_kernel[(1,)](torch.zeros(4))


def test_trap_16_an_empty_tensor_has_no_element():
    with interpret() as launches:
        copy_kernel[(0,)](torch.empty(0), torch.empty(0), 0, 0, BLOCK=4)
        with pytest.raises(OutOfBounds, match=r"x\[0\] of 0 elements"):
            copy_kernel[(1,)](torch.empty(0), torch.empty(4), 4, 4, BLOCK=4)
    assert launches[0].moved == 0
