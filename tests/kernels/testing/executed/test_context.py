"""Any @triton.jit kernel, compiled and executed."""

import gc

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fasttrain_kernels.testing import Fault, Unsupported, execute, interpret
from fasttrain_kernels.testing.compiled import record
from tests.kernels.executed.test_ops import undefined


@triton.jit
def scale_kernel(x, y, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def unmasked_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i))


@triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128}, num_warps=4)], key=["n"])
@triton.jit
def tuned_kernel(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, BLOCK, mask=i < n)


@triton.jit
def tuple_kernel(pointers, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(pointers[1] + i, tl.load(pointers[0] + i, mask=i < n), mask=i < n)


@triton.jit
def matmul_kernel(x, y, out, N: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at), input_precision=PRECISION))


@triton.jit
def descriptor_kernel(x_desc, y_desc, out, M, N, K, TILE: tl.constexpr, SPECIALISED: tl.constexpr):
    out_desc = tl.make_tensor_descriptor(out, shape=[M, N], strides=[N, 1], block_shape=[TILE, TILE])
    i, j = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in tl.range(0, K, TILE, warp_specialize=SPECIALISED):
        total = tl.dot(x_desc.load([i, k]), y_desc.load([k, j]), total)
    out_desc.store([i, j], total)


@triton.jit
def pointers_kernel(addresses, n, BLOCK: tl.constexpr):
    x = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


TARGETS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_is_executed_on_cpu_tensors(target):
    x, y = torch.randn(1000), torch.empty(1000)
    with execute(target) as launches:
        scale_kernel[(4,)](x, y, 1000, 0.5, BLOCK=256)
    assert torch.equal(y, x * 0.5)
    (launch,) = launches
    assert (launch.kernel, launch.grid, launch.threads) == ("scale_kernel", (4, 1, 1), 128)
    assert (launch.bytes_read, launch.bytes_written) == (4000, 4000)
    assert launches.findings == []
    assert str(launches).startswith("scale_kernel (4, 1, 1) x 128 threads: ")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2])
def test_tensor_cores_multiply_as_torch_does(target, dtype):
    x, y = torch.randn(2, 64, 64).to(dtype)
    out = torch.empty(64, 64)
    with execute(target) as launches:
        matmul_kernel[(1,)](x, y, out, 64, "tf32")
    tolerance = 64 * 2**-10 if dtype == torch.float32 else 1e-4  # tf32 drops 13 bits
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=0, atol=tolerance)
    assert launches[0].mma_flops == 2 * 64**3
    assert launches.findings == []


@pytest.mark.parametrize("specialised", [False, True])
@pytest.mark.parametrize("options", [{}, dict(schedule="reverse", asynchronous="early")], ids=["late", "early"])
@pytest.mark.parametrize("target", TARGETS)
def test_tiles_are_copied_by_descriptors_of_host_and_kernel(target, options, specialised):
    """sm_80 has no tensor maps: Triton computes addresses there."""
    torch.manual_seed(0)
    x, y, out = torch.randn(100, 136).bfloat16(), torch.randn(136, 72).bfloat16(), torch.empty(100, 72)
    descriptors = [TensorDescriptor.from_tensor(one, [64, 64]) for one in (x, y)]
    with execute(target, **options) as launches:
        descriptor_kernel[(2, 2)](*descriptors, out, 100, 72, 136, TILE=64, SPECIALISED=specialised, num_stages=3)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=0, atol=1e-4)
    early = "mbarrier.inval"  # Triton: on sm_100 a specialised kernel does not await its last commits
    assert [finding for finding in undefined(launches) if not (specialised and early in finding)] == []
    assert ("bulk copy" in launches[0].classes) == (int(target[3:]) >= 90)


def test_strided_and_offset_views_are_passed_as_they_are():
    base = torch.zeros(40)
    with execute("sm_80"):
        scale_kernel[(1,)](torch.ones(8), base[3:11], 8, 2.0, BLOCK=8)
    assert base.tolist() == [0.0] * 3 + [2.0] * 8 + [0.0] * 29


def test_empty_memory_holds_nan():
    with execute("sm_80"):
        assert torch.empty(4).isnan().all()


def test_tuples_are_spread():
    x, y = torch.arange(8.0), torch.zeros(8)
    with execute("sm_80"):
        tuple_kernel[(1,)]((x, y), 8, BLOCK=8)
    assert torch.equal(x, y)


def test_tensors_behind_addresses_in_memory():
    tensors = [torch.zeros(20), torch.ones(30)[:20]]
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors])
    with execute("sm_90", pointees=tensors):
        pointers_kernel[(2,)](addresses, 20, BLOCK=32, num_warps=1)
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 20, [2.0] * 20]
    with pytest.raises(Fault, match="4 lanes outside"), execute("sm_90", pointees=tensors):
        pointers_kernel[(2,)](addresses, 24, BLOCK=32, num_warps=1)
    with pytest.raises(Fault, match="outside of all tensors"), execute("sm_90"):
        pointers_kernel[(2,)](addresses, 20, BLOCK=32, num_warps=1)


@pytest.mark.parametrize(("config", "block"), [(0, 64), (1, 128)])
def test_an_autotuned_kernel_runs_in_one_configuration(config, block):
    x = torch.zeros(100, dtype=torch.int32)
    with execute("sm_90", config=config) as launches:
        tuned_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)
    assert x.tolist() == [block] * 100
    assert len(launches) == 1
    with pytest.raises(ValueError, match="config 2 of a kernel with 2 configurations"), execute("sm_90", config=2):
        tuned_kernel[(1,)](x, 100)


def test_faults_name_kernel_instruction_and_source():
    message = r"unmasked_kernel: ld.global.* \(PTX line \d+, test_context.py:\d+\): .* outside"
    with pytest.raises(Fault, match=message), execute("sm_90"):
        unmasked_kernel[(1,)](torch.zeros(100), torch.zeros(128), BLOCK=128)


def test_ptx_can_be_changed_before_it_is_executed():
    x, y = torch.ones(32), torch.empty(32)
    with execute("sm_80", rewrite=lambda ptx: ptx.replace("mul.f32", "add.f32").replace("mul.rn.f32", "add.f32")):
        scale_kernel[(1,)](x, y, 32, 0.5, BLOCK=32)
    assert y.tolist() == [1.5] * 32
    with execute("sm_80"):
        scale_kernel[(1,)](x, y, 32, 0.5, BLOCK=32)
    assert y.tolist() == [0.5] * 32
    with execute("sm_80", rewrite=lambda ptx: ptx.replace("ld.global", "ld.nowhere")), pytest.raises(Unsupported):
        scale_kernel[(1,)](x, y, 32, 0.5, BLOCK=32)


def test_no_kernel_asks_a_driver_to_unload_it(monkeypatch):
    """An error there is only printed."""
    ignored: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    with execute("sm_80"):
        scale_kernel[(1,)](torch.ones(32), torch.empty(32), 32, 0.5, BLOCK=32)
    gc.collect()
    assert ignored == []


def test_it_leaves_no_trace():
    x, y = torch.ones(32), torch.empty(32)
    with execute("sm_80"):
        scale_kernel[(1,)](x, y, 32, 0.5, BLOCK=32)
    with record("sm_80") as launches:  # the cache is the same: what was executed has no binary
        scale_kernel[(1,)](x, y, 32, 0.5, BLOCK=32)
    assert launches.metadata[0].registers > 0
    with interpret():
        scale_kernel[(1,)](x, y, 32, 0.25, BLOCK=32)
    assert y.tolist() == [0.25] * 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(target="gfx942"), "target gfx942 has no PTX"),
        (dict(target="sm_70"), "target 'sm_70' is unknown"),
        (dict(target="sm_80", schedule="backward"), "schedule 'backward' must be one of 'lockstep', 'forward'"),
        (dict(target="sm_80", approximations="bad"), "approximations 'bad' must be one of 'exact', 'worst'"),
        (dict(target="sm_80", asynchronous="now"), "asynchronous 'now' must be one of 'late', 'early'"),
        (dict(target="sm_80", collisions="none"), "collisions 'none' must be one of 'last', 'first'"),
    ],
)
def test_options_that_it_does_not_know_are_errors(options, message):
    with pytest.raises(ValueError, match=message), execute(**options):
        pass
