"""Retention: which checkpoints may go once a new one is committed, and how they go."""

from __future__ import annotations

import math
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from fasttrain import config
from fasttrain.checkpoint.committed import Checkpoint
from fasttrain.distributed.collectives import on_main
from fasttrain.fs import sync

if TYPE_CHECKING:
    import torch.distributed as dist

PARTIAL = "partial"  # in the hidden name of a directory that is being written
DELETED = "deleted"  # and of one that is being deleted
_QUARANTINED = "quarantined-"  # before the name of one that training went back from


def expendable(checkpoints: list[Checkpoint], keep: config.CheckpointConfig) -> list[Checkpoint]:
    """Those that no rule keeps. `checkpoints`, by step, end with the one just saved: that one always stays."""
    last_of_step = {checkpoint.step: checkpoint for checkpoint in checkpoints}
    steps = list(last_of_step)
    kept = {steps[-1], *steps[max(len(steps) - keep.keep_last, 0) :]}
    if keep.keep_every:
        kept |= {step for step in steps if step % keep.keep_every == 0}
    losses = {step: c.loss for step, c in last_of_step.items() if c.loss is not None and math.isfinite(c.loss)}
    if keep.keep_best and losses:
        kept.add(min(losses, key=lambda step: (losses[step], -step)))
    return [c for c in checkpoints if c.step not in kept or c is not last_of_step[c.step]]


def hidden(path: Path, state: str) -> Path:
    """A name beside `path` that no listing shows."""
    return path.parent / f".{path.name}.{state}-{uuid.uuid4().hex[:8]}"


def delete(path: Path) -> None:
    """First its name, at once; then its files: nothing half deleted looks whole."""
    going = hidden(path, DELETED)
    os.rename(path, going)
    shutil.rmtree(going)


def clear_leftovers(directory: Path) -> None:
    """Delete what killed processes have left half written or half deleted."""
    for state in (PARTIAL, DELETED):
        for path in directory.glob(f".*step-*.{state}-*"):
            shutil.rmtree(path)


def quarantine(checkpoints: list[Checkpoint], group: dist.ProcessGroup | None) -> None:
    """Take checkpoints out of their run without deleting them, because training went back to an earlier one.

    Left where they are, they would be what a restart resumes from. They become quarantined-step-00000400-..., which
    find still reads by that name; they go when there is no disk space for a new one. All ranks call this, while no save
    is running.
    """

    def rename() -> None:
        for path in (checkpoint.path for checkpoint in reversed(checkpoints)):  # a kill in between leaves no gap
            os.rename(path, path.parent / f"{_QUARANTINED}{path.name}-{uuid.uuid4().hex[:8]}")
            sync(path.parent)

    on_main(group, rename)


def quarantined(directory: Path) -> list[Path]:
    """What quarantine has left, by step."""
    return sorted(directory.glob(f"{_QUARANTINED}step-*"))
