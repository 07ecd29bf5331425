"""Checkpoints: the state of a run on disk, verified before it counts. docs/checkpoints.md explains the files.

saver = Checkpoints(run / "checkpoints", config.checkpoint, group=group)   # group: gloo, used by nothing else
checkpoint = newest_valid(run / "checkpoints", group, on_warning=print)
if checkpoint:
    metadata = restore(checkpoint, model, optimizer, scaler, group=group)
for step in ...:
    for outcome in saver.poll():
        ...                                                                # Saved or Failed
    saver.save(model, optimizer, scaler, step=step + 1, metadata={...}, loss=validation_loss)
outcomes = saver.close()
"""

from fasttrain.checkpoint.committed import Checkpoint, committed_paths, find, list_checkpoints, newest_valid
from fasttrain.checkpoint.disk_space import DiskSpace, before_run, checkpoint_bytes
from fasttrain.checkpoint.retention import quarantine
from fasttrain.checkpoint.saver import Checkpoints, Failed, Outcome, Saved
from fasttrain.checkpoint.state import restore

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "DiskSpace",
    "Failed",
    "Outcome",
    "Saved",
    "before_run",
    "checkpoint_bytes",
    "committed_paths",
    "find",
    "list_checkpoints",
    "newest_valid",
    "quarantine",
    "restore",
]
