"""A Triton driver for a GPU that is not there: launches are compiled for it by Triton itself, and then handed over.

Everything between the call and the launch (argument specialisation, options, compilation) is Triton's own, so that the
kernel is the one that the same call gets on the real device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.testing.targets import Target


class OfflineDriver(DriverBase):
    """Answers to what Triton asks. Subclasses say what a launch does."""

    def __init__(self, target: Target, purpose: str, *, max_shared: int) -> None:
        self.purpose = purpose
        self.stages: dict[str, dict[str, Path]] = {}  # by hash: the texts of a kernel's stages by extension
        self.target = GPUTarget(target.backend, target.arch, target.warp_size)
        # Triton keeps compiled kernels per device: the name keeps ours apart from those of devices and other targets.
        self.device = f"{purpose} for {target.name}"
        self.utils = _Utils(max_shared)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Called once per binary; returns what is called for each launch."""
        raise NotImplementedError

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return self.device

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError(f"{self.purpose}: no launcher is compiled")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError(f"{self.purpose}: nothing is measured, so that nothing can be autotuned")


class _Utils:
    """Answers to what Triton asks about the device and of the loader."""

    def __init__(self, max_shared: int) -> None:
        self.max_shared = max_shared

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": self.max_shared}

    def load_binary(self, *_: Any) -> tuple[Any, Any, int, int, int]:
        module, function, registers, spills, max_threads = object(), object(), 0, 0, 1 << 30
        return module, function, registers, spills, max_threads


@contextlib.contextmanager
def active(offline: OfflineDriver, target: Target, *, multiprocessors: int | None = None) -> Iterator[None]:
    """Launch for CPU tensors with this driver, and choose tiles for the target."""
    before = driver._active
    compiled_for = set[Any]()

    def listen(**event: Any) -> None:
        if others:
            others(**event)
        compiled_for.add(event["src"].fn)
        stages = {Path(path).suffix[1:]: Path(path) for path in event["metadata_group"].values()}
        offline.stages[event["metadata"]["hash"]] = stages

    simulated = kernels_on_cpu(
        shared_memory=target.shared_per_block,
        warp_size=target.warp_size,
        multiprocessors=multiprocessors,
        compute_capability=target.arch if isinstance(target.arch, int) else 0,
    )
    with knobs.compilation.scope(), simulated:
        others = knobs.compilation.listener
        knobs.compilation.listener = listen
        driver.set_active(offline)
        try:
            yield
        finally:
            driver._active = before
            for function in compiled_for:
                for kernel in function.device_caches.pop(offline.device, [{}])[0].values():
                    kernel.module = None  # which Triton 3.9 would ask the active driver to unload, once there is none
