"""A Triton driver that compiles the launches of host code for a GPU that is not there, and runs none.

Triton asks a driver for the target, for the current device and for a launcher. The driver here names the target that
was asked for and hands out a launcher that takes notes. Everything between (argument specialisation, options,
compilation) is Triton's own, so that the binary is the one that the same call gets on the real device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.testing.compiled.amd import amd_metadata
from fasttrain_kernels.testing.compiled.listing import Binary
from fasttrain_kernels.testing.compiled.metadata import KernelMetadata
from fasttrain_kernels.testing.compiled.nvidia import nvidia_metadata
from fasttrain_kernels.testing.targets import Target, target_named


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch: the kernel, its grid, and the recorded binary that it would have run."""

    kernel: str
    grid: tuple[int, int, int]
    key: str  # of the binary: source, specialisation, options, target, compiler
    _recorded: RecordedLaunches = field(repr=False, compare=False)

    @property
    def metadata(self) -> KernelMetadata:
        return self._recorded.metadata_of(self.key)


class RecordedLaunches(list[RecordedLaunch]):
    """All launches, in order."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self._binaries: dict[str, Binary] = {}
        self._metadata: dict[str, KernelMetadata] = {}

    @property
    def metadata(self) -> list[KernelMetadata]:
        """The metadata of every distinct binary, in the order of first launch."""
        return [self.metadata_of(key) for key in dict.fromkeys(launch.key for launch in self)]

    def metadata_of(self, key: str) -> KernelMetadata:
        if key not in self._metadata:
            missing = {launch.key: self._binaries[launch.key] for launch in self if launch.key not in self._metadata}
            read = amd_metadata if self.target.backend == "hip" else nvidia_metadata
            self._metadata |= zip(missing, read(self.target, list(missing.values())), strict=True)
        return self._metadata[key]


@contextlib.contextmanager
def record(target: str) -> Iterator[RecordedLaunches]:
    """Compile every Triton kernel that is launched in the block for `target` ("sm_90", "gfx942", ...), and run none:
    outputs keep whatever was in their memory, and `torch.empty` tensors of real training shapes cost nothing.

    Ops of this library launch their kernels for CPU tensors too, and choose tiles for the target. Shared memory and
    threads are not checked while recording: see KernelMetadata.fits.
    """
    launches = RecordedLaunches(target_named(target))
    recorder = _RecordingDriver(launches)
    before = driver._active
    compiled_for = set[Any]()

    def listen(**event: Any) -> None:
        if others:
            others(**event)
        compiled_for.add(event["src"].fn)
        stages = {Path(path).suffix[1:]: Path(path) for path in event["metadata_group"].values()}
        recorder.stages[event["metadata"]["hash"]] = stages

    limits = launches.target
    simulated = kernels_on_cpu(shared_memory=limits.shared_per_block, warp_size=limits.warp_size)
    with knobs.compilation.scope(), simulated:
        others = knobs.compilation.listener
        knobs.compilation.listener = listen
        driver.set_active(recorder)
        try:
            yield launches
        finally:
            driver._active = before
            for function in compiled_for:
                function.device_caches.pop(recorder.device, None)


class _RecordingDriver(DriverBase):
    def __init__(self, launches: RecordedLaunches) -> None:
        target = launches.target
        self.launches = launches
        self.stages: dict[str, dict[str, Path]] = {}
        self.target = GPUTarget(target.backend, target.arch, target.warp_size)
        # Triton keeps compiled kernels per device: the name keeps ours apart from those of devices and other targets.
        self.device = f"recording for {target.name}"
        self.utils = _Utils(target)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Called once per binary; returns what is called for each launch."""
        self.launches._binaries[metadata.hash] = Binary(metadata, self.stages[metadata.hash])

        def launch(grid_x: int, grid_y: int, grid_z: int, *_: Any) -> None:
            self.launches.append(RecordedLaunch(metadata.name, (grid_x, grid_y, grid_z), metadata.hash, self.launches))

        return launch

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
        raise NotImplementedError("record: kernels are compiled and not run")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("record: kernels are compiled and not run, so that nothing can be autotuned")


class _Utils:
    """Answers to what Triton asks about the device and of the loader."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {
            "max_shared_mem": 1 << 30
        }  # KernelMetadata.fits reports what does not fit, instead of an exception at the first

    def load_binary(self, name: str, binary: bytes, shared: int, device: Any) -> tuple[Any, Any, int, int, int]:
        module, function, registers, spills, max_threads = object(), object(), 0, 0, 1 << 30
        return module, function, registers, spills, max_threads
