"""Checkpoints: the state of a run on disk, verified before it counts. docs/checkpoints.md explains files and calls."""

from fasttrain.checkpoint.committed import Checkpoint, committed_paths, find, list_checkpoints, newest_valid
from fasttrain.checkpoint.disk_space import before_run, check_disk_space, checkpoint_bytes
from fasttrain.checkpoint.retention import quarantine
from fasttrain.checkpoint.saver import Checkpoints, Failed, Outcome, Saved
from fasttrain.checkpoint.state import restore

__all__ = [
    "Checkpoint", "Checkpoints", "Failed", "Outcome", "Saved", "before_run", "check_disk_space",
    "checkpoint_bytes", "committed_paths",
    "find", "list_checkpoints", "newest_valid", "quarantine", "restore",
]  # fmt: skip
