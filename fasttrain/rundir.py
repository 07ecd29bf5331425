"""Where the files of a run are."""

from __future__ import annotations

from itertools import chain, count
from pathlib import Path


class RunDir:
    """The directory of a run, `--out`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"  # the effective configuration
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"  # a line for each step
        self.validations = path / "validation.jsonl"  # a line for each validation set, each time
        self.events = path / "events.jsonl"  # a line for each event
        self.evaluations = path / "evaluations.jsonl"  # a line for each set or task of `fasttrain eval`
        self.segments = path / "batches.jsonl"  # a line for each data segment: which batches which steps have
        self.lock = path / ".lock"  # held by the process that trains
        self.report = path / "report.html"
        self.profile = path / "profile"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb.json"  # the id of the run on Weights & Biases

    def free_sibling(self) -> RunDir:
        """A run beside this one that does not exist yet, for what cannot be written here."""
        names = chain(["rescued"], (f"rescued-{number}" for number in count(2)))
        paths = (self.path.with_name(f"{self.path.name}-{name}") for name in names)
        return RunDir(next(path for path in paths if not path.exists()))

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> RunDir | None:
        """The run that a checkpoint's directory belongs to; None: it lies elsewhere."""
        run = cls(checkpoint.parent.parent)
        return run if checkpoint.parent == run.checkpoints else None
