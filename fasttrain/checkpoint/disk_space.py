"""Disk space for checkpoints: for all that a run will hold, before it starts; and for each one, before it is saved.

What the file system says is free may still be less than that: quotas do not show, and others write too. So a save that
finds enough space can fail all the same, and says so; this only makes it rare and early.
"""

import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from fasttrain import config
from fasttrain.checkpoint.committed import Checkpoint, list_checkpoints
from fasttrain.checkpoint.retention import expendable, quarantined
from fasttrain.flops import state_bytes
from fasttrain.fs import DISK_RESERVE, DISK_SLACK, StatVfs, free_bytes
from fasttrain.rundir import RunDir
from fasttrain.units import disk_size


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """Whether there is enough."""

    directory: Path
    needed: int  # bytes
    free: int  # bytes
    prune: tuple[Path, ...] = ()  # checkpoints that may go, and whose going is enough

    @property
    def state(self) -> Literal["enough", "prune", "not enough"]:
        return "enough" if self.needed <= self.free else "prune" if self.prune else "not enough"

    def __str__(self) -> str:
        numbers = f"{disk_size(self.needed)} are needed and {disk_size(self.free)} are free in {self.directory}"
        if self.state == "enough":
            return numbers
        if self.state == "prune":
            return f"{numbers}; deleting {', '.join(path.name for path in self.prune)} is enough"
        return f"{numbers}; free some, or keep fewer checkpoints (checkpoint.keep_last, keep_every)"


def checkpoint_bytes(directory: Path, estimate: int) -> int:
    """Size of the run's next checkpoint: that of its last one, or the estimate (flops.state_bytes)."""
    existing = list_checkpoints(directory)
    return existing[-1].bytes if existing else estimate


def check_disk_space(settings: config.Config, vocab: int) -> None:
    """A disk that the run would fill is an error now, not in the night."""
    directory = RunDir(settings.out).checkpoints
    size = checkpoint_bytes(directory, state_bytes(settings.model, vocab, settings.optim.kind))
    space = before_run(directory, settings.checkpoint, size=size, steps=settings.batch.steps)
    if space.state != "enough":
        raise ValueError(f"no disk space for the checkpoints of this run: {space}")


def before_run(
    directory: Path,
    keep: config.CheckpointConfig,
    *,
    size: int,  # bytes of a checkpoint
    steps: int,  # of the whole run
    statvfs: StatVfs = os.statvfs,
) -> DiskSpace:
    """Disk space for the checkpoints that retention will hold at most, the one being written included."""
    present = [checkpoint.bytes for checkpoint in list_checkpoints(directory)] + [*map(_size, quarantined(directory))]
    needed = max(int(keep.max_held(steps) * size * DISK_SLACK) - sum(present), 0) + DISK_RESERVE
    return DiskSpace(directory=directory, needed=needed, free=free_bytes(directory, statvfs))


def before_save(
    directory: Path,
    keep: config.CheckpointConfig,
    *,
    size: int,  # bytes of a checkpoint
    step: int,  # of the one to be saved
    statvfs: StatVfs = os.statvfs,
) -> DiskSpace:
    """Disk space for one more, if need be without those that may go."""
    needed, free = int(size * DISK_SLACK) + DISK_RESERVE, free_bytes(directory, statvfs)
    going = may_go(directory, keep, step=step) if needed > free else []
    gained = accumulate(map(_size, going), initial=free)
    enough = next((number for number, space in enumerate(gained) if needed <= space), 0)  # of them; 0: all are not
    return DiskSpace(directory=directory, needed=needed, free=free, prune=tuple(going[:enough]))


def may_go(directory: Path, keep: config.CheckpointConfig, *, step: int) -> list[Path]:
    """What a run can do without when there is no disk space for the checkpoint of `step`, first what it misses least.

    First what is quarantined, then what retention would delete after that checkpoint. The newest one always stays.
    """
    existing = list_checkpoints(directory)
    coming = Checkpoint(path=directory, step=step, loss=None, optimizer="", scaler={}, metadata={}, files=())
    going = [checkpoint.path for checkpoint in expendable([*existing, coming], keep) if checkpoint is not existing[-1]]
    return quarantined(directory) + going


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())
