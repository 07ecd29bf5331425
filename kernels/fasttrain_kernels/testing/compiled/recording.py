"""The launches of host code, compiled for a GPU that is not there; none is run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fasttrain_kernels.testing.compiled.amd import amd_metadata
from fasttrain_kernels.testing.compiled.listing import Binary
from fasttrain_kernels.testing.compiled.metadata import KernelMetadata
from fasttrain_kernels.testing.compiled.nvidia import nvidia_metadata
from fasttrain_kernels.testing.driver import OfflineDriver, active
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
    with active(_RecordingDriver(launches), launches.target):
        yield launches


class _RecordingDriver(OfflineDriver):
    def __init__(self, launches: RecordedLaunches) -> None:
        # KernelMetadata.fits reports what does not fit, instead of an exception at the first
        super().__init__(launches.target, "recording", max_shared=1 << 30)
        self.launches = launches

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        self.launches._binaries[metadata.hash] = Binary(metadata, self.stages[metadata.hash])

        def launch(grid_x: int, grid_y: int, grid_z: int, *_: Any) -> None:
            self.launches.append(RecordedLaunch(metadata.name, (grid_x, grid_y, grid_z), metadata.hash, self.launches))

        return launch
