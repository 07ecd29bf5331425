import runpy
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra.libdevice import tanh

from fasttrain_kernels import _registration, swiglu
from fasttrain_kernels.testing import KernelError, interpret
from fasttrain_kernels.testing.interpreter import tiles


@triton.jit
def tanh_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=1.0)
    tl.static_assert(BLOCK > 1)
    for _ in tl.range(0, n, BLOCK):
        a = tanh(a) / tl.max(a, 0)
    tl.store(y + i, tl.sort(a) + tl.sum(a), mask=i < n)


def launch(n=8):
    tanh_kernel[(1,)](torch.rand(n), torch.empty(n), n, BLOCK=8)


def test_a_kernel_inside_a_function_may_use_its_closure():
    width: tl.constexpr = 4

    @triton.jit
    def inner_kernel(y):
        tl.store(y + tl.arange(0, width), 1.0)

    with interpret():
        inner_kernel[(1,)](y := torch.empty(4))
    assert y.tolist() == [1.0] * 4


def test_everything_is_as_before_afterwards():
    def state():
        return (
            *(tl.load.__code__, tl.load.__kwdefaults__, tl.core.reduce, tl.tensor.__add__, tl.tensor.__init__),
            *(triton.JITFunction.run, triton.JITFunction.__call__, tanh.__code__, tl.range.__iter__),
            *(torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
            *(torch._C._get_deterministic_fill_uninitialized_memory(), _registration._kernels_on_cpu),
            *(sorted(vars(tl.tensor)), sorted(vars(tl)), sorted(globals())),
        )

    def nested():
        with interpret() as outer:
            launch()
            with interpret(order="reverse") as inner:
                launch()
            launch()
            assert (len(outer), len(inner)) == (2, 1)
            raise ZeroDivisionError

    before = state()
    with pytest.raises(ZeroDivisionError):
        nested()
    assert state() == before


def test_public_ops_run_their_kernels_only_inside():
    x = torch.randn(2, 8)
    with interpret() as launches:
        swiglu(x, x)
    swiglu(x, x)
    assert [launch.kernel for launch in launches] == ["_swiglu_fwd_kernel"]


def test_the_same_function_compiles_to_the_same_ptx_before_inside_and_after(tmp_path):
    def ptx():
        source = ASTSource(
            tanh_kernel,
            signature={"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"},
            constexprs={(3,): 256},
        )
        return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.compilation.always_compile = True
        before = ptx()
        with interpret():
            launch()
            inside = ptx()
        assert before == inside == ptx()


def test_triton_interpret_is_refused():
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), interpret():
            pass


def test_without_ml_dtypes_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r"pip install fasttrain-kernels\[testing\]"):
        runpy.run_path(tiles.__file__)


def test_numpy_settings_do_not_leak():
    before = np.geterr()
    with interpret(), pytest.raises(KernelError, match="static_assert"):
        tanh_kernel[(1,)](torch.rand(4), torch.empty(4), 4, BLOCK=1)
    assert np.geterr() == before


def test_what_is_not_given_of_the_simulated_gpu_stays_as_it_is_outside():
    def simulated():
        gpu, cpu = _registration, torch.device("cpu")
        return gpu.multiprocessor_count(cpu), gpu.shared_memory(cpu), gpu.warps(256, cpu)

    outer = _registration.kernels_on_cpu(multiprocessors=7, shared_memory=1 << 17)
    with outer, interpret(), _registration.kernels_on_cpu(warp_size=64):
        assert simulated() == (7, 1 << 17, 4)
    assert simulated() == (132, 101_376, 8)
