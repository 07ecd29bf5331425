"""Remembered launches; on the null GPU, tests/bench/test_nullgpu.py compares all of them with Triton's own."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.amd.driver import HIPLauncher
from triton.backends.nvidia.driver import CudaLauncher

from fasttrain_kernels import _launch, _registration


class Kernel:
    """As a JITFunction: compiles at its first call."""

    params = tuple(SimpleNamespace(name=name, default=None) for name in ("x", "N", "SIZE", "OPTION"))
    pre_run_hooks: tuple[Any, ...] = ()

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.compiled.append((grid, args, constants))
            return SimpleNamespace(run=lambda *a: self.launched.append(a), function="f", packed_metadata="m")

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    monkeypatch.setattr(_launch, "_compiled", {})
    return Kernel()


def test_the_second_launch_of_a_kind_does_not_ask_triton(kernel):
    x = torch.zeros(64)
    _launch.launch(kernel, (7,), x, 48, SIZE=8, num_warps=4)
    _launch.launch(kernel, (9, 2), x, 32, SIZE=8, num_warps=4)
    assert len(kernel.compiled) == 1
    assert kernel.launched == [(9, 2, 1, 101, "f", "m", None, None, None, x, 32, 8, None)]


@pytest.mark.parametrize(
    ("x", "N", "size"),
    [
        (torch.zeros(64, dtype=torch.bfloat16), 48, 8),
        (torch.zeros(64)[1:], 48, 8),  # not aligned to 16 bytes
        (torch.zeros(64), 1, 8),
        (torch.zeros(64), 49, 8),
        (torch.zeros(64), 48 + 2**32, 8),
        (torch.zeros(64), 48, 16),
        (None, 48, 8),
    ],
)
def test_what_triton_compiles_anew_for_is_another_kind(kernel, x, N, size):
    _launch.launch(kernel, (7,), torch.zeros(64), 48, SIZE=8, num_warps=4)
    _launch.launch(kernel, (7,), x, N, SIZE=size, num_warps=4)
    assert len(kernel.compiled) == 2


def test_whoever_wants_to_be_told_of_launches_is_told(kernel):
    knobs.runtime.launch_enter_hook.add(print)
    try:
        for _ in range(2):
            _launch.launch(kernel, (7,), torch.zeros(64), 48, SIZE=8)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert len(kernel.compiled) == 2


@pytest.mark.parametrize("launcher", [CudaLauncher, HIPLauncher])
def test_tritons_launchers_take_what_they_are_given(launcher):
    names = [name.lower().lstrip("_") for name in inspect.signature(launcher.__call__).parameters]
    assert names == [
        *("self", "gridx", "gridy", "gridz", "stream", "function", "kernel_metadata", "launch_metadata"),
        *("launch_enter_hook", "launch_exit_hook", "args"),
    ]


def test_a_simulated_gpu_may_change_between_two_choices():
    chosen = _launch.remembered(lambda: _registration.warps(64, torch.device("cpu")))
    with _registration.kernels_on_cpu(warp_size=32):
        assert chosen() == 2
    with _registration.kernels_on_cpu(warp_size=64):
        assert chosen() == 1
