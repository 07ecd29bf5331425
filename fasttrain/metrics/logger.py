"""What a run writes: one logger, and a sink for each place that it writes to.

JSON lines are always written. The other sinks are for looking on, and no run dies of its onlookers. A new sink is a
class with the four methods of Sink, and a line in SINKS: docs/metrics.md has an example.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from fasttrain import config
from fasttrain.config_toml import to_toml
from fasttrain.events import Event, EventKind
from fasttrain.metrics.display import Display
from fasttrain.metrics.jsonl import JsonLines
from fasttrain.metrics.record import Moved, News, Note, Rewind, StepRecord, ValidationRecord
from fasttrain.metrics.tensorboard import TensorBoard
from fasttrain.metrics.weights_and_biases import WeightsAndBiases
from fasttrain.rundir import RunDir

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Sink(Protocol):
    """A place that a run writes to."""

    def step(self, step: int, values: Mapping[str, float]) -> None: ...
    def validation(self, step: int, name: str, values: Mapping[str, float]) -> None: ...
    def event(self, event: Event) -> None: ...
    def close(self, exit_code: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """What a sink may want to know of a run."""

    run: RunDir
    log: config.LogConfig
    config_toml: str  # the effective configuration
    resume_step: int  # steps that are kept; 0: a new run


def _warn(name: str, error: Exception) -> None:
    _logger.warning("metrics: continues without %s, which failed: %s: %s", name, type(error).__name__, error)


class Sinks:
    """All sinks of a run on the main rank; one that fails is dropped and reported, and the others continue."""

    def __init__(
        self, options: SinkOptions, *, is_main: bool, on_failure: Callable[[str, Exception], None] = _warn
    ) -> None:
        self._sinks: list[Sink] = []
        self._on_failure = on_failure
        for number, open_sink in enumerate(SINKS if is_main else ()):
            try:
                sink = open_sink(options)
            except Exception as error:
                # JSON lines; or what the user of a new run has asked for and can change
                if number == 0 or (options.resume_step == 0 and isinstance(error, ValueError | ImportError)):
                    raise
                on_failure(open_sink.__name__.strip("_"), error)
            else:
                self._sinks += [sink] if sink is not None else []

    def each(self, method: str, *arguments: object) -> None:
        """Call a method of Sink on all of them."""
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:
                if isinstance(sink, JsonLines):  # which handles a full disk itself: this is a mistake of the caller
                    raise
                self._sinks.remove(sink)
                self._on_failure(type(sink).__name__, error)

    def close(self, exit_code: int = 0, *, but: int = 0) -> None:
        """exit_code: other than 0, W&B shows the run as failed; but: so many of the first sinks stay open."""
        while len(self._sinks) > but:
            sink = self._sinks.pop()
            try:
                sink.close(exit_code)
            except Exception as error:
                self._on_failure(type(sink).__name__, error)


class RunLogger:
    """Writes what happens in a run to the terminal and to the sinks. It decides nothing.

    The loop calls write() once a step, with the news of that step in their order. Every rank has a logger, and that of
    the main rank writes.
    """

    def __init__(
        self,
        settings: config.Config,
        *,
        step: int,  # steps completed
        tokens: int,  # trained on by then
        is_main: bool,
        refresh_report: Callable[[bool], None] = lambda running: None,
    ) -> None:
        self._settings, self._is_main, self._refresh_report = settings, is_main, refresh_report
        self._step, self._tokens, self._last_step = step, tokens, step
        self._tokens_per_step = settings.batch.sequences * settings.data.sequence
        self._failed, self._unsaid = set[str](), list[Event]()  # accessories, and what is to be said of them
        self._sinks = self._open_sinks(step)
        self._display = Display(settings.log, steps=settings.batch.steps, is_main=is_main)

    def attempt(self, name: str, work: Callable[[], T]) -> T | None:
        """Do what the run can do without: the first failure of that name is an event."""
        try:
            return work()
        except Exception as error:
            self._note_failure(name, error)
            return None

    def _note_failure(self, name: str, error: Exception) -> None:
        if name not in self._failed:
            text = f"{name} failed, and the run continues without it: {type(error).__name__}: {error}"
            evidence = dict(accessory=name, error=str(error))
            event = Event(
                step=self._last_step, kind=EventKind.ACCESSORY, text=text, action="continues", evidence=evidence
            )
            self._failed.add(name)
            self._unsaid.append(event)

    def write(self, news: Iterable[News]) -> None:
        self._write(news)
        self._say_failures()

    def _say_failures(self) -> None:
        while self._unsaid:
            self._write([self._unsaid.pop(0)])

    def _write(self, news: Iterable[News]) -> None:
        for item in news:
            match item:
                case StepRecord():
                    self._last_step = item.step
                    self._sinks.each("step", item.step, item.values)
                    self._display.step(item.step, item.values)
                case ValidationRecord():
                    self._sinks.each("validation", *item)
                    self._display.validation(*item)
                case Event():
                    tokens = self._tokens + (item.step - self._step) * self._tokens_per_step
                    self._sinks.each("event", replace(item, tokens=tokens, time=time.time()))
                    self._display.event(item)
                case Note():
                    self._display.note(item.text)
                    if item.saved:
                        self.attempt("report", lambda: self._refresh_report(True))
                case Rewind():
                    self._sinks.close(0)
                    self._sinks = self._open_sinks(item.step)
                case Moved():
                    self._sinks.close(0)
                    self._settings = replace(self._settings, out=item.out)
                    self._refresh_report = lambda running: None
                    with suppress(OSError):  # there may be no place at all: the terminal says so
                        self._sinks = self._open_sinks(self._step)
                        RunDir(item.out).config.write_text(to_toml(self._settings))

    def close(self, exit_code: int) -> None:
        self.attempt("report", lambda: self._refresh_report(False))
        self._sinks.close(exit_code, but=1)
        self._say_failures()
        self._display.close()
        self._sinks.close(exit_code)

    def abandon(self) -> None:
        """After an error: give the terminal back, and tell W&B. Nothing happens if it was closed."""
        self._display.close()
        self._sinks.close(1)

    def _open_sinks(self, step: int) -> Sinks:
        run, toml = RunDir(self._settings.out), to_toml(self._settings)
        options = SinkOptions(run=run, log=self._settings.log, config_toml=toml, resume_step=step)
        return Sinks(options, is_main=self._is_main, on_failure=self._note_failure)


def _weights_and_biases(options: SinkOptions) -> Sink | None:
    project = options.log.wandb
    return WeightsAndBiases(options.run, project, config_toml=options.config_toml) if project else None


def _tensorboard(options: SinkOptions) -> Sink | None:
    """On by default, so that its absence cannot be an error."""
    if not options.log.tensorboard:
        return None
    try:
        return TensorBoard(options.run, config_toml=options.config_toml, resume_step=options.resume_step)
    except ImportError:
        _logger.warning(
            "metrics: no TensorBoard events, tensorboard is not installed; pip install 'fasttrain[tensorboard]', "
            "or set log.tensorboard to false"
        )
        return None


# Each opens its sink for a run, or gives None if the run does not ask for it.
SINKS: list[Callable[[SinkOptions], Sink | None]]
SINKS = [lambda options: JsonLines(options.run), _weights_and_biases, _tensorboard]
