"""What a run leaves behind, step by step: one recorder, and a sink for each place that it writes to.

JSON lines are always written. The other sinks are for looking on, and no run dies of its onlookers: one that fails is
dropped with a warning, and the rest goes on. A new one is a class with the four methods of Sink, and a line in SINKS:
docs/metrics.md has an example.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from fasttrain import config
from fasttrain.metrics.jsonl import Event, JsonLines
from fasttrain.metrics.tensorboard import TensorBoard
from fasttrain.metrics.weights_and_biases import WeightsAndBiases

_logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A place that a run writes to."""

    def step(self, step: int, values: Mapping[str, float]) -> None: ...
    def validation(self, step: int, name: str, values: Mapping[str, float]) -> None: ...
    def event(self, event: Event) -> None: ...
    def close(self, exit_code: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a sink may want to know of a run."""

    run: Path  # its directory
    log: config.Log
    config_toml: str  # the effective configuration
    resume_step: int  # the last step that is kept, counted from 1; 0: a new run


class Recorder:
    """Writes on rank 0; on other ranks it takes everything and does nothing. Use as a context, or call close()."""

    def __init__(
        self,
        run: Path,
        log: config.Log,
        *,
        config_toml: str,  # the effective configuration
        resume_step: int,  # the last step that is kept, counted from 1; 0: a new run
        rank: int,
    ) -> None:
        opening = Opening(run=run, log=log, config_toml=config_toml, resume_step=resume_step)
        opened = [open_sink(opening) for open_sink in SINKS] if rank == 0 else []
        self._sinks = [sink for sink in opened if sink is not None]

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a training step."""
        self._each("step", step, values)

    def validation(self, step: int, name: str, values: Mapping[str, float]) -> None:
        """The figures of the validation set `name` after a step."""
        self._each("validation", step, name, values)

    def event(self, event: Event) -> None:
        """Something that happened."""
        self._each("event", event)

    def close(self, exit_code: int = 0) -> None:
        """exit_code: other than 0, W&B shows the run as failed."""
        self._each("close", exit_code)
        self._sinks = []

    def _each(self, method: str, *arguments: object) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:
                if isinstance(sink, JsonLines):  # which deals with the disk itself: this is a mistake of the caller
                    raise
                self._sinks.remove(sink)
                name = type(sink).__name__
                _logger.warning("metrics: goes on without %s, which failed: %s: %s", name, type(error).__name__, error)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.close(0 if kind is None else 1)


def _json_lines(opening: Opening) -> Sink:
    return JsonLines(opening.run)


def _weights_and_biases(opening: Opening) -> Sink | None:
    if not opening.log.wandb:
        return None
    return WeightsAndBiases(opening.run, opening.log.wandb, config_toml=opening.config_toml)


def _tensorboard(opening: Opening) -> Sink | None:
    """On by default, so that its absence cannot be an error."""
    if not opening.log.tensorboard:
        return None
    try:
        return TensorBoard(opening.run, config_toml=opening.config_toml, resume_step=opening.resume_step)
    except ImportError:
        _logger.warning(
            "metrics: no TensorBoard events, tensorboard is not installed; pip install 'fasttrain[tensorboard]', "
            "or set log.tensorboard to false"
        )
        return None


# Each opens its sink for a run, or gives None if the run does not ask for it.
SINKS: list[Callable[[Opening], Sink | None]] = [_json_lines, _weights_and_biases, _tensorboard]
