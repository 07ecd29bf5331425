"""The state of a run: what a step changes, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fasttrain.checkpoint.saver import Checkpoints
from fasttrain.config import Config
from fasttrain.config_toml import to_toml
from fasttrain.data.batches import Batch, Batches
from fasttrain.data.cursor import DataCursor, Skip
from fasttrain.data.datasets import TrainingData
from fasttrain.data.locate import documents_of
from fasttrain.data.segments import DataSegment, append_segment, with_absolute_paths
from fasttrain.distributed.cuda_graph import StepGraph
from fasttrain.distributed.runtime import Runtime
from fasttrain.metrics.hardware import versions
from fasttrain.model import Decoder
from fasttrain.monitor import Monitor
from fasttrain.rundir import RunDir

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0  # steps completed
    tokens: int = 0  # trained on
    cursor: DataCursor = field(default_factory=DataCursor)
    best_loss: float | None = None  # of all validations, on the held-out documents
    misses: int = 0  # validations in a row since then
    rollbacks: int = 0  # so far

    def after_validation(self, loss: float) -> Progress:
        if self.best_loss is None or loss < self.best_loss:
            return replace(self, best_loss=loss, misses=0)
        return replace(self, misses=self.misses + 1)

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Progress:
        """From a checkpoint, which holds asdict(progress)."""
        return cls(**{**metadata, "cursor": DataCursor.of(metadata["cursor"])})


@dataclass(kw_only=True)
class TrainState:
    """What a run consists of. All ranks have the same, but for their shards of the weights."""

    settings: Config
    runtime: Runtime
    model: Decoder
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    graph: StepGraph | None = None  # of the steps
    data: TrainingData
    progress: Progress
    monitor: Monitor
    resumed_from: Path | None  # a checkpoint
    batches: Batches = field(init=False)
    norm_groups: list[list[nn.Parameter]] = field(init=False)  # of the model
    tokenizer: Tokenizer | None = field(init=False)  # for samples; read at the start, for its file may vanish

    def __post_init__(self) -> None:
        self.tokenizer = self.data.tokenizer() if self.settings.validation.sample else None
        self.batches = self.segment().batches(self.data, self.runtime.dp_rank, self.runtime.dp_size)
        self.norm_groups = self.model.norm_groups()

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.settings.out)

    def remaining(self) -> Iterator[int]:
        """Steps completed before each step that is left; a rollback makes it go back."""
        while self.progress.step < self.settings.batch.steps:
            yield self.progress.step

    def advance(self, steps: int = 1) -> None:
        """So many more steps are completed; negative: they changed nothing, and do not count."""
        tokens = steps * self.settings.batch.sequences * self.settings.data.sequence
        self.progress = replace(self.progress, step=self.progress.step + steps, tokens=self.progress.tokens + tokens)

    def micro_batches(self, step: int) -> list[Batch]:
        """A rank's micro-batches of a step."""
        micro_batches = self.batches.at_or_blank(step).split(self.settings.batch.micro)
        micro_batches = [micro.pad_documents() for micro in micro_batches] if self.graph else micro_batches
        return [micro.pin_memory() if self.runtime.device.type == "cuda" else micro for micro in micro_batches]

    def epochs_at(self, step: int) -> dict[str, float]:
        """How often each component has been seen, for the logger."""
        return {f"epoch/{name}" if name else "epoch": n for name, n in self.batches.epochs_at(step).items()}

    def segment(self) -> DataSegment:
        """What decides about the batches from here on."""
        settings, origin = self.settings, self.resumed_from
        elsewhere = origin is not None and origin.parent != self.rundir.checkpoints
        return DataSegment(
            step=self.progress.step,
            cursor=self.progress.cursor,
            sequences=settings.batch.sequences,
            dp_size=self.runtime.dp_size,
            data=with_absolute_paths(settings.data, self.data),
            datasets=self.data.digests,
            before=str(origin) if elsewhere else None,
        )

    def record_segment(self) -> None:
        if self.runtime.is_main:
            append_segment(self.rundir.path, self.segment())

    def skip_batches(self, steps: range) -> Skip:
        """Take later batches from a step on."""
        cursor, skip = self.progress.cursor, Skip(steps.start, len(steps))
        self.progress = replace(self.progress, cursor=replace(cursor, skips=(*cursor.skips, skip)))
        self.batches = self.segment().batches(self.data, self.runtime.dp_rank, self.runtime.dp_size)
        self.record_segment()
        return skip

    def documents_of(self, steps: range) -> list[str]:
        """What steps trained on, for an event; on the rank that writes it."""
        return documents_of(self.rundir.path, steps) if self.runtime.is_main else []

    def metadata(self) -> dict[str, Any]:
        """What a checkpoint says beside weights and optimizer state."""
        return {
            "progress": asdict(self.progress),
            "config": to_toml(self.settings),
            "dataset": self.data.digest,
            "datasets": self.data.digests,
            "used": self.batches.used_at(self.progress.step),
            "monitor": self.monitor.state(),
            "world_size": self.runtime.world_size,
            "versions": versions(),
        }

    def save(self, checkpoints: Checkpoints, loss: float | None) -> None:
        """Begin to save; loss: of validation at this step."""
        step, metadata = self.progress.step, self.metadata()
        checkpoints.save(self.model, self.optimizer, self.scaler, step=step, metadata=metadata, loss=loss)
