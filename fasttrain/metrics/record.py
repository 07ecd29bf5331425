"""What there is to log: the figures of a step, of a validation, and lines for the terminal."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fasttrain.events import Event


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A completed step, over all ranks."""

    step: int  # steps completed
    tokens: int  # of the run, this step included
    loss: float
    grad_norm: float  # before clipping
    block_norms: list[float]
    stop_requested: bool  # a rank was asked to end the run
    save_failed: bool  # every rank knows that the last save failed
    read_failed: bool  # a rank could not read its batch: the step changed nothing
    phases: Mapping[str, float]  # seconds of this rank, by phase
    step_phases: Mapping[str, float]  # without those beside the step: validation, checkpoint, profile
    sensors: Mapping[str, float]  # of this rank's GPU
    mfu: float
    memory: float  # bytes, the peak of this rank
    values: Mapping[str, float]  # all that is logged


class ValidationRecord(NamedTuple):
    """A validation set after a step."""

    step: int
    name: str
    values: Mapping[str, float]


class Note(NamedTuple):
    """A line on the terminal."""

    text: str
    saved: bool = False  # it is about a checkpoint that was saved: the report is due


class Rewind(NamedTuple):
    """The run continues from an earlier step; what was logged of later ones no longer counts."""

    step: int


class Moved(NamedTuple):
    """The run's directory is gone; what is to be said is written to another one."""

    out: Path


News = StepRecord | ValidationRecord | Event | Note | Rewind | Moved
