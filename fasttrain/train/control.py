"""Control: the only place that decides to stop, save, skip batches or roll back.

Every decision follows from figures that are the same on all ranks, so all ranks take it at the same step. What one rank
knows alone (a signal, a failed save) it tells the others with its next step: `flags`.
"""

import time
from collections.abc import Iterator, Sequence
from enum import Enum, auto

from fasttrain.checkpoint.saver import Checkpoints, Failed, Saved
from fasttrain.data.batches import Batch
from fasttrain.distributed.collectives import on_all
from fasttrain.events import Anomaly, Event, EventKind
from fasttrain.metrics.record import Moved, News, Note, StepRecord
from fasttrain.rundir import RunDir
from fasttrain.train.messages import about_save
from fasttrain.train.state import TrainState
from fasttrain.train.step import StepFlags

PAUSE = 10.0  # seconds between the first retries of a paused run; they become rarer
LONGEST_PAUSE = 60.0


class Decision(Enum):
    """What the loop does next."""

    CONTINUE = auto()
    SKIP_BATCHES = auto()
    ROLL_BACK = auto()
    SAVE = auto()
    PAUSE = auto()
    EXIT = auto()


class Control:
    """note() what steps, events and saves have brought; then ask for decisions."""

    def __init__(self, state: TrainState, checkpoints: Checkpoints, signals: Sequence[int]) -> None:
        self.stop_reason = ""  # why the monitor ends the run; nothing is saved then
        self.stop_requested = False  # a rank has received a signal
        self.save_failure: Failed | None = None  # what this rank knows of the last save, if it failed
        self.lost = ""  # what happened to files that the run cannot do without
        self.rescued: RunDir | None = None  # where the state was saved, the run's directory being lost
        self.unread: int | None = None  # steps completed before a batch that a rank could not read
        self.signals = signals
        self.anomaly: Anomaly | None = None  # to be handled
        self.last_loss = 0.0
        self._state, self._checkpoints = state, checkpoints
        self._saved_step, self._saved_at = state.progress.step, time.monotonic()  # of the last verified checkpoint
        self._failures = 0  # of saves in a row, that all ranks know of
        self._failed_at = self._begun_at = -1  # steps: when all knew of a failed save, when the last save began

    def flags(self, micro_batches: Sequence[Batch]) -> StepFlags:
        """What this rank tells the others with its next step."""
        self.lost = self.lost or micro_batches[0].error
        return StepFlags(bool(self.signals), self.save_failure is not None, bool(self.lost))

    def save_age(self) -> dict[str, float]:
        """What a kill would lose."""
        steps = self._state.progress.step - self._saved_step
        return dict(unsaved_steps=steps, checkpoint_age=time.monotonic() - self._saved_at)

    def note(self, record: StepRecord, events: Sequence[Event]) -> None:
        if record.read_failed and self.unread is None:
            self.unread = record.step - 1
        self.stop_requested = self.stop_requested or record.stop_requested
        if record.save_failed:
            self._failed_at = record.step
        self.last_loss = record.loss
        self.anomaly = self.anomaly or next((event.anomaly for event in events if event.anomaly), None)

    def decide_on_anomaly(self) -> Decision:
        """What monitor.spike says."""
        anomaly, settings, rollbacks = self.anomaly, self._state.settings.monitor, self._state.progress.rollbacks
        if anomaly is None or self.stop_requested:
            return Decision.CONTINUE
        if settings.spike == "skip":
            return Decision.SKIP_BATCHES
        if settings.spike == "rollback" and rollbacks < settings.rollbacks:
            return Decision.ROLL_BACK
        if settings.spike == "warn":
            self.anomaly = None
            return Decision.CONTINUE
        again = f", again after {rollbacks} rollbacks (monitor.rollbacks)" if settings.spike == "rollback" else ""
        return self.stop(again)

    def stop(self, why: str) -> Decision:
        """End the run because of the anomaly."""
        assert self.anomaly
        self.stop_reason = f"the loss spiked at step {self.anomaly.step} ({self.anomaly}){why}"
        return Decision.EXIT

    def decide_on_save(self, *, due: bool) -> Decision:
        """Save if it is due, or if the last save failed and all ranks know it.

        due: a checkpoint is. All ranks have waited for the last save then, and know the same of it.
        """
        settings, step = self._state.settings, self._state.progress.step
        if self._failed_at > self._begun_at or (due and self.save_failure):
            if self._checkpoints.is_displaced():
                return Decision.EXIT
            self._failures += 1
            if self._failures > settings.checkpoint.retries:
                self._begun_at = step
                return Decision.PAUSE if settings.checkpoint.on_save_failure == "pause" else Decision.EXIT
            return Decision.SAVE
        return Decision.SAVE if due or self.is_ending else Decision.CONTINUE

    @property
    def is_ending(self) -> bool:
        """The run ends after this step, with a save: it was asked to, or has lost patience."""
        patience = self._state.settings.validation.patience
        return self.stop_requested or 0 < patience <= self._state.progress.misses

    def save(self, loss: float | None = None, *, at: int | None = None) -> None:
        """Begin to save the state; loss: of validation; at: the step to count retries from, of a rollback."""
        self._begun_at, self.save_failure = self._state.progress.step if at is None else at, None
        self._state.save(self._checkpoints, loss)

    def poll_saves(self, *, wait: bool = False) -> list[News]:
        """Note what has become of saves; wait: for the last one to end."""
        if wait:
            self._checkpoints.wait()
        news: list[News] = []
        for outcome in self._checkpoints.poll():
            news += about_save(outcome, last_saved=self._saved_step)
            self.save_failure = outcome if isinstance(outcome, Failed) else None
            if isinstance(outcome, Saved):
                self._note_saved(outcome)
        if self.save_failure and not wait:
            step, failure = self._state.progress.step, self.save_failure
            news.append(Note(f"step {step}: warning: step {failure.step} is not saved: {failure.error}"))
        return news

    def _note_saved(self, outcome: Saved) -> None:
        self.save_failure, self._failures, self._saved_step = None, 0, outcome.step
        self._saved_at = time.monotonic() - outcome.seconds

    def rewind(self) -> None:
        """The run has rolled back."""
        self.anomaly, self._saved_step = None, min(self._saved_step, self._state.progress.step)

    def end(self) -> list[News]:
        """Wait for the last save, and save what is not, where files are lost. All ranks call it."""
        state, news = self._state, self.poll_saves(wait=True)
        if self.unread is not None:  # the steps since then changed nothing
            state.advance(self.unread - state.progress.step)
            self.lost = "; ".join(sorted({*on_all(state.runtime.checkpoint_group, lambda: self.lost)} - {""}))
        if self._checkpoints.is_displaced():
            self.lost = f"{state.settings.out} was deleted, moved or replaced while the run was training in it"
            self.rescued = self._checkpoints.move()
            news.append(Moved(self.rescued.path))
        elif not self.lost or self._saved_step == state.progress.step:
            return news
        self.save()
        return [*news, *self.poll_saves(wait=True)]

    def needs_pause(self) -> bool:
        """At the end: the last save failed, and the run may not end without it."""
        on_failure = self._state.settings.checkpoint.on_save_failure
        return self.save_failure is not None and on_failure == "pause" and not (self.stop_requested or self.lost)

    def pause(self) -> Iterator[list[News]]:
        """Retry until a save succeeds, or a signal comes; what there is to say, as it happens."""
        assert self.save_failure
        if self.save_failure.is_final:  # the run ends instead, and says why
            self.stop_requested = True
            return
        step, start, pause = self._state.progress.step, time.monotonic(), PAUSE
        text = f"paused until a checkpoint can be saved: {self.save_failure.error}"
        action = f"retries every {PAUSE:g} to {LONGEST_PAUSE:g} s"
        yield [Event(step=step, kind=EventKind.PAUSE, text=text, action=action)]
        while not self._stops_within(pause):
            pause = min(2 * pause, LONGEST_PAUSE)
            self._state.save(self._checkpoints, None)
            self._checkpoints.wait()
            *_, outcome = self._checkpoints.poll()  # ranks save together or fail together
            if isinstance(outcome, Saved):
                self._note_saved(outcome)
                text = f"saved again after a pause of {time.monotonic() - start:,.0f} s"
                over = Event(step=step, kind=EventKind.PAUSE_OVER, text=text)
                yield [*about_save(outcome, last_saved=outcome.step), over]
                return
            yield [Note(f"step {step}: paused: {outcome.error}")]
        self.stop_requested = True

    def _stops_within(self, seconds: float) -> bool:
        """Whether any rank has received a signal, after a while, or at once when this one has."""
        end = time.monotonic() + seconds
        while not self.signals and time.monotonic() < end:
            time.sleep(min(0.1, seconds))
        return any(on_all(self._state.runtime.checkpoint_group, lambda: bool(self.signals)))
