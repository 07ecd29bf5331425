"""Room for checkpoints: for all that a run will hold, before it starts; and for each one, before it is saved.

What the file system says is free may still be less than that: quotas do not show, and others write too. So a save that
finds enough room can fail all the same, and says so; this only makes it rare and early.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fasttrain import config
from fasttrain.checkpoint import Checkpoint, list_checkpoints
from fasttrain.checkpoint.retention import expendable

StatVfs = Callable[[Path], os.statvfs_result]

_STATE = 12  # bytes per parameter: the weight and two averages, fp32. Muon has one average of matrices: less
_RESERVE = 64 * 2**20  # bytes to leave: metrics and incidents are written to the same place
_SLACK = 1.02  # file systems round up, and checkpoint.json is not in a checkpoint's size


@dataclass(frozen=True, kw_only=True)
class Room:
    """Whether there is enough."""

    state: Literal["enough", "prune", "not enough"]
    directory: Path
    needed: int  # bytes
    free: int  # bytes
    prune: tuple[Path, ...] = ()  # checkpoints that may go, and whose going is enough

    def __str__(self) -> str:
        numbers = f"{self.needed / 1e9:,.2f} GB are needed and {self.free / 1e9:,.2f} GB are free in {self.directory}"
        if self.state == "enough":
            return numbers
        if self.state == "prune":
            return f"{numbers}; deleting {', '.join(path.name for path in self.prune)} is enough"
        return f"{numbers}; free some, or keep fewer checkpoints (checkpoint.keep_last, keep_every)"

    def facts(self) -> dict[str, Any]:
        """The evidence, for an incident."""
        return asdict(self) | dict(directory=str(self.directory), prune=[str(path) for path in self.prune])


def checkpoint_bytes(directory: Path, parameters: int) -> int:
    """Of the run's next checkpoint: as its last one, or by the number of parameters."""
    existing = list_checkpoints(directory)
    return existing[-1].bytes if existing else _STATE * parameters


def before_run(
    directory: Path,
    keep: config.Checkpoint,
    *,
    size: int,  # bytes of a checkpoint
    steps: int,  # of the whole run
    statvfs: StatVfs = os.statvfs,
) -> Room:
    """Room for the checkpoints that retention will hold at most, the one being written included."""
    present = sum(checkpoint.bytes for checkpoint in list_checkpoints(directory))
    needed = max(int(_held(keep, steps) * size * _SLACK) - present, 0) + _RESERVE
    free = free_bytes(directory, statvfs)
    return Room(state="enough" if needed <= free else "not enough", directory=directory, needed=needed, free=free)


def before_save(
    directory: Path,
    keep: config.Checkpoint,
    *,
    size: int,  # bytes of a checkpoint
    step: int,  # of the one to be saved
    statvfs: StatVfs = os.statvfs,
) -> Room:
    """Room for one more; if need be without those that retention would delete after it. The newest one always stays."""
    needed, free = int(size * _SLACK) + _RESERVE, free_bytes(directory, statvfs)
    if needed <= free:
        return Room(state="enough", directory=directory, needed=needed, free=free)
    gained, going = free, []
    for checkpoint in _expendable_then(directory, keep, step):
        going.append(checkpoint.path)
        gained += checkpoint.bytes
        if needed <= gained:
            return Room(state="prune", directory=directory, needed=needed, free=free, prune=tuple(going))
    return Room(state="not enough", directory=directory, needed=needed, free=free)


def free_bytes(directory: Path, statvfs: StatVfs = os.statvfs) -> int:
    """That this user may write in a directory, which may not exist yet."""
    while not directory.exists():
        directory = directory.parent
    status = statvfs(directory)
    return status.f_bavail * status.f_frsize


def _held(keep: config.Checkpoint, steps: int) -> int:
    """Checkpoints on the disk at once, at most: a new one is written before an old one goes."""
    every = keep.every or steps
    saves = -(-steps // every)
    marked = len([step for step in range(every, steps + 1, every) if keep.keep_every and step % keep.keep_every == 0])
    return min(saves, max(keep.keep_last, 1) + keep.keep_best + marked + 1)


def _expendable_then(directory: Path, keep: config.Checkpoint, step: int) -> list[Checkpoint]:
    """What retention would delete once the next checkpoint is there, the oldest first."""
    existing = list_checkpoints(directory)
    coming = Checkpoint(path=directory, step=step, loss=None, optimizer="", scaler={}, facts={}, files=())
    return [checkpoint for checkpoint in expendable([*existing, coming], keep) if checkpoint is not existing[-1]]
