"""Where the files of a run are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class RunDir(NamedTuple):
    """The directory of a run, `--out`."""

    path: Path

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunDir | None:
        """The run that a checkpoint's directory belongs to; None: it lies elsewhere."""
        run = cls(checkpoint.parent.parent)
        return run if checkpoint.parent == run.checkpoints else None

    @property
    def config(self) -> Path:
        """The effective configuration."""
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """A line for each step."""
        return self.path / "metrics.jsonl"

    @property
    def validations(self) -> Path:
        """A line for each validation set, each time."""
        return self.path / "validation.jsonl"

    @property
    def events(self) -> Path:
        """A line for each event."""
        return self.path / "events.jsonl"

    @property
    def evaluations(self) -> Path:
        """A line for each set or task of `fasttrain eval`."""
        return self.path / "evaluations.jsonl"

    @property
    def segments(self) -> Path:
        """A line for each data segment: which batches which steps have."""
        return self.path / "batches.jsonl"

    @property
    def lock(self) -> Path:
        """Held by the process that trains."""
        return self.path / ".lock"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        """The id of the run on Weights & Biases."""
        return self.path / "wandb.json"
