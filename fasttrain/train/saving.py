"""Saves that fail are tried again until one succeeds. No state is given up for want of room.

    failed  ->  again, every few steps, a line at each  ->  after checkpoint.retries: hold the run, or end it

Ranks hear of a failed save at different steps, and have to act at the same one. So each says with its next step that it
knows (step.py), and once all do, all try again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fasttrain import config
from fasttrain.checkpoint import Checkpoints, Failed, Saved
from fasttrain.distributed.collectives import together
from fasttrain.distributed.runtime import Runtime
from fasttrain.train.journal import Journal

PAUSE = 10.0  # seconds between the first attempts of a run that is held; they become rarer
LONGEST_PAUSE = 60.0


class Saves:
    """The saves of a run. All ranks call every method alike."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        save: Callable[[float | None], None],  # saves the run as it is now, given its validation loss
        journal: Journal,
        runtime: Runtime,
        signals: Sequence[int],  # that this rank has got
        settings: config.Checkpoint,
    ) -> None:
        self.failed: Failed | None = None
        """What this rank knows of the last save, if it came to nothing."""
        self._checkpoints, self._save, self._journal = checkpoints, save, journal
        self._runtime, self._signals, self._settings = runtime, signals, settings
        self._failures = 0  # in a row, of which all ranks know
        self._begun = -1  # the step in which the last save was

    def after_step(self, step: int, *, due: bool, loss: float | None) -> bool:
        """Save if it is due, or if the last save failed; False: saves keep failing, and the run is to end.

        step: the one just done, from 0; loss: of its validation.
        """
        known_to_all = self._journal.unsaved_at > self._begun
        if known_to_all:
            self._failures += 1
        if known_to_all and self._failures > self._settings.retries:
            self._begun = step
            return self._settings.unsaved == "pause" and self._hold(step + 1)
        if known_to_all or due:
            self.begin(step, loss)
        self.poll()
        if self.failed:
            self._journal.note(f"step {step + 1}: warning: step {self.failed.step} is not saved: {self.failed.error}")
        return True

    def begin(self, step: int, loss: float | None) -> None:
        """Save the run as it is now, after `step`."""
        self._begun, self.failed = step, None
        self._save(loss)

    def poll(self) -> None:
        """Tell what has become of saves."""
        for outcome in self._checkpoints.poll():
            self._journal.save(outcome)
            self.failed = outcome if isinstance(outcome, Failed) else None
            if isinstance(outcome, Saved):
                self._failures = 0

    def wait(self) -> None:
        """Until the last save has come to an end."""
        self._checkpoints.wait()
        self.poll()

    def finish(self, step: int) -> None:
        """The run is over after `step`: its last save succeeds, unless it is to end without."""
        self.wait()
        if self.failed and self._settings.unsaved == "pause" and not self._journal.stop:
            self._hold(step + 1)

    def _hold(self, done: int) -> bool:
        """Try again until a save succeeds, or a signal comes. True: the run goes on."""
        assert self.failed
        self._journal.event(
            done, "pause", f"the run is held until a checkpoint can be saved: {self.failed.error}",
            action=f"tries again every {PAUSE:g} to {LONGEST_PAUSE:g} s",
        )  # fmt: skip
        start, pause = time.monotonic(), PAUSE
        while self._nobody_wants_to_stop(pause):
            pause = min(2 * pause, LONGEST_PAUSE)
            self._save(None)
            self._checkpoints.wait()
            *_, outcome = self._checkpoints.poll()  # ranks save together or fail together
            if isinstance(outcome, Saved):
                self._journal.save(outcome)
                self.failed, self._failures = None, 0
                seconds = time.monotonic() - start
                self._journal.event(done, "pause over", f"saved again; the run was held for {seconds:,.0f} s")
                return True
            self._journal.note(f"step {done}: the run is held: {outcome.error}")
        self._journal.stop = True
        return True  # to its end, as asked

    def _nobody_wants_to_stop(self, seconds: float) -> bool:
        """After a while, or at once when this rank has got a signal."""
        end = time.monotonic() + seconds
        while not self._signals and time.monotonic() < end:
            time.sleep(min(0.1, seconds))
        return not any(together(self._runtime.files, lambda: bool(self._signals)))
