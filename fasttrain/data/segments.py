"""Which batches a run has taken: a line of batches.jsonl for each data segment, steps that one process group trained.

A line says all that decides about the batches from its step on, and overrides earlier lines of that step and of later
ones: a run that rolls back to a checkpoint writes another line.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fasttrain import config
from fasttrain.data.cursor import DataCursor
from fasttrain.rundir import RunDir
from fasttrain.schema import build, parse

if TYPE_CHECKING:  # torch, which to read the file does without
    from fasttrain.data.batches import Batches
    from fasttrain.data.datasets import TrainingData


@dataclass(frozen=True, kw_only=True)
class DataSegment:
    """Steps of a run with the same data, in the same order, on the same ranks."""

    step: Annotated[int, config.STEPS]  # the first
    cursor: DataCursor
    sequences: Annotated[int, config.BATCH]  # of a step
    dp_size: Annotated[int, config.BATCH]
    data: config.DataConfig  # with absolute paths
    datasets: dict[str, str]  # name and digest
    before: str | None = None  # the checkpoint that the run resumed from, if another run made it

    def open(self) -> TrainingData:
        """The data, if it still is what the run had."""
        from fasttrain.data.datasets import training_data

        data = training_data(self.data)
        for name, digest in data.digests.items():
            if digest != (then := self.datasets.get(name, "")):
                raise ValueError(
                    f"data: {data.datasets[name].path} is not what the run trained on (digest {digest[:12]}, was "
                    f"{then[:12]}); put the former dataset there"
                )
        return data

    def batches(self, data: TrainingData, dp_rank: int = 0, dp_size: int = 1) -> Batches:
        """A rank's batches; by default those of all ranks together."""
        from fasttrain.data.batches import Batches

        return Batches(
            data.components("train"), sequence=self.data.sequence, sequences=self.sequences, seed=self.data.seed,
            document_mask=self.data.document_mask, dp_rank=dp_rank, dp_size=dp_size, cursor=self.cursor,
        )  # fmt: skip


def with_absolute_paths(settings: config.DataConfig, data: TrainingData) -> config.DataConfig:
    """The settings with the paths of the data, wherever they are asked for later."""
    paths = {name: dataset.path.absolute() for name, dataset in data.datasets.items()}
    if not settings.mixture:
        return replace(settings, path=paths[""])
    return replace(settings, mixture={name: replace(part, path=paths[name]) for name, part in settings.mixture.items()})


def append_segment(run: Path, segment: DataSegment) -> None:
    """Append a line, and have it on the disk before the steps that it is about."""
    with open(RunDir(run).segments, "a") as file:
        file.write(json.dumps(asdict(segment), default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_segments(run: Path) -> list[DataSegment]:
    """The segments of a run as they stand, ascending."""
    path = RunDir(run).segments
    try:
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        found: list[DataSegment] = [build(DataSegment, parse(line)) for line in lines]
    except OSError:
        raise ValueError(f"{path} does not exist: {run} is not the directory of a run") from None
    except ValueError as error:
        raise ValueError(f"{path} is corrupt ({error}); copy it again") from None
    standing: list[DataSegment] = []
    for segment in found:
        standing = [*(earlier for earlier in standing if earlier.step < segment.step), segment]
    return standing


def segment_at(run: Path, step: int) -> DataSegment:
    """The segment that step `step` (from 0) was, or will be, trained in."""
    standing = read_segments(run)
    found = [segment for segment in standing if segment.step <= step]
    if not standing:
        raise ValueError(f"{RunDir(run).segments} is empty: the run has not begun")
    if not found:
        first = standing[0]
        raise ValueError(
            f"{run} begins at step {first.step}, after {first.before}; ask the run that this checkpoint belongs to"
        )
    return found[-1]
