"""Recording of launches."""

import contextlib

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver

from fasttrain_kernels._registration import runs_triton, shared_memory, warps
from fasttrain_kernels.testing.compiled import record

CPU = torch.device("cpu")


@triton.jit
def copy_kernel(x, out, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    tl.store(out + col, tl.load(x + col))


def floats(*shape):
    return torch.empty(shape)


def test_record_compiles_and_runs_nothing():
    out = torch.full((8192,), 7.0)
    with record("sm_90") as launches:
        copy_kernel[(3,)](floats(8192), out, BLOCK=8192)
        copy_kernel[(5,)](floats(8192), out, BLOCK=8192)
    assert (out == 7).all()
    assert [(launch.kernel, launch.grid) for launch in launches] == [
        ("copy_kernel", (3, 1, 1)),
        ("copy_kernel", (5, 1, 1)),
    ]
    assert [metadata.kernel for metadata in launches.metadata] == ["copy_kernel"]
    assert launches[0].metadata is launches[1].metadata


def test_record_restores_everything():
    before = driver._active, knobs.compilation.listener, dict(copy_kernel.device_caches)
    with contextlib.suppress(KeyboardInterrupt), record("gfx942"):
        copy_kernel[(1,)](floats(8192), floats(8192), BLOCK=8192)
        assert runs_triton(floats(1))
        assert (shared_memory(CPU), warps(256, CPU)) == (65_536, 4)
        raise KeyboardInterrupt
    assert (driver._active, knobs.compilation.listener, dict(copy_kernel.device_caches)) == before
    assert not runs_triton(floats(1))
    assert (shared_memory(CPU), warps(256, CPU)) == (101_376, 8)


def test_a_target_does_not_see_the_kernels_of_another():
    kinds = []
    for target in ("sm_80", "sm_90", "sm_80"):
        with record(target) as launches:
            copy_kernel[(1,)](floats(8192), floats(8192), BLOCK=8192)
        kinds.append(launches.metadata[0].target)
    assert kinds == ["sm_80", "sm_90", "sm_80"]
