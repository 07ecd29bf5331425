"""Room on a disk: how many checkpoints are on it at once, and what is free. Without torch, for `fasttrain plan`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fasttrain import config

StatVfs = Callable[[Path], os.statvfs_result]

SLACK = 1.02  # file systems round up, and checkpoint.json is not in a checkpoint's size
RESERVE = 64 * 2**20  # bytes to leave: metrics and incidents are written to the same place


def held(keep: config.CheckpointConfig, steps: int) -> int:
    """Checkpoints on the disk at once, at most: a new one is written before an old one goes."""
    every = keep.every or steps
    saves = -(-steps // every)
    marked = sum(1 for step in range(every, steps + 1, every) if step % keep.keep_every == 0) if keep.keep_every else 0
    return min(saves, max(keep.keep_last, 1) + keep.keep_best + marked + 1)


def free_bytes(directory: Path, statvfs: StatVfs = os.statvfs) -> int:
    """That this user may write in a directory, which may not exist yet."""
    while not directory.exists():
        directory = directory.parent
    status = statvfs(directory)
    return status.f_bavail * status.f_frsize
