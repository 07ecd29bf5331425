"""What a run says of itself, on the terminal and in its files, as it goes.

A step's results are read while the next one is already under way, so that the host never waits for the device. Every
rank reads them, and therefore knows at the same step that the run is to stop; the first one prints and writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fasttrain.checkpoint import Failed, Outcome
from fasttrain.config import Config, to_toml
from fasttrain.metrics import Display, GpuSensors, Lap, Recorder, peak_flops, used_memory
from fasttrain.model import flops_per_token
from fasttrain.resume import Progress
from fasttrain.runtime import Runtime
from fasttrain.step import StepResult
from fasttrain.validation import Score
from fasttrain.watch import Judges, Speed

PARTS = ("data", "wait", "forward", "backward", "optimizer", "record")  # of a step
BESIDE = ("validation", "checkpoint")  # parts of a lap that are not the step's


class _Pending(NamedTuple):
    step: int
    result: StepResult
    lap: Lap
    values: dict[str, float]


class Journal:
    """Use as a context."""

    def __init__(self, settings: Config, runtime: Runtime, progress: Progress, judges: Judges, *, vocab: int) -> None:
        self.stop = False
        """A rank was asked to end the run."""
        self.failed_save: Failed | None = None
        """The last save, if it came to nothing."""
        self._pending: _Pending | None = None
        self._start, self._runtime, self._judges = progress, runtime, judges
        self._tokens = settings.batch.sequences * settings.data.sequence  # of a step
        self._flops = flops_per_token(settings.model, vocab, settings.data.sequence)
        self._peak = peak_flops(runtime.device, runtime.dtype) * runtime.world
        self._sensors = GpuSensors(runtime.device)
        self._speed = Speed(PARTS, runtime.figures, runtime.device, threshold=settings.watch.slowdown)
        self._settings = settings
        self._recorder = self._new_recorder(progress.step)
        self._display = Display(settings.log, steps=settings.batch.steps, rank=runtime.rank)

    def step(self, step: int, result: StepResult, lap: Lap, **values: float) -> None:
        """Take note of a step, and tell of the one before it."""
        before, self._pending = self._pending, _Pending(step, result, lap, values)
        if before is not None:
            self._tell(before)

    def flush(self) -> None:
        """Tell of the last step too."""
        if self._pending is not None:
            self._tell(self._pending)
        self._pending = None

    def go_back(self, step: int) -> None:
        """The run goes on from `step` steps done; what was not told of later ones is not told."""
        self._pending = None
        self._recorder.close(0)
        self._recorder = self._new_recorder(step)

    def validation(self, step: int, name: str, score: Score, suspicion: str) -> None:
        figures = dict(loss=score.loss, perplexity=score.perplexity)
        if score.bits_per_byte is not None:
            figures["bits_per_byte"] = score.bits_per_byte
        self._recorder.validation(step, name, figures | dict(accuracy=score.accuracy))
        self._display.validation(step, name, **figures)
        if suspicion:
            self.event(step, "validation", f"{name}: {suspicion}")

    def save(self, outcome: Outcome) -> None:
        """What became of a checkpoint."""
        self.failed_save = outcome if isinstance(outcome, Failed) else None
        if isinstance(outcome, Failed):
            self.event(outcome.step, "failed save", f"the checkpoint could not be saved: {outcome.error}")
            return
        size = f"{outcome.bytes / 1e6:,.0f} MB in {outcome.seconds:.1f} s"
        self.note(f"step {outcome.step}: saved and verified {outcome.path} ({size})")
        if outcome.trouble:
            self.event(outcome.step, "retention", outcome.trouble)

    def event(self, step: int, kind: str, text: str, **facts: Any) -> None:
        """Something that happened: a line on the terminal and in incidents.jsonl."""
        self._recorder.event(step, kind, text, **facts)
        self._display.note(f"step {step}: {text}")

    def sample(self, step: int, text: str) -> None:
        """What the model writes."""
        self._recorder.event(step, "sample", text)
        self._display.note(f"a sample:\n{text}\n")

    def note(self, text: str) -> None:
        """A line on the terminal."""
        self._display.note(text)

    def close(self, exit_code: int) -> None:
        self.flush()
        self._display.close()
        self._recorder.close(exit_code)

    def _new_recorder(self, step: int) -> Recorder:
        settings, rank = self._settings, self._runtime.rank
        return Recorder(settings.out, settings.log, config_toml=to_toml(settings), resume_step=step, rank=rank)

    def _tell(self, pending: _Pending) -> None:
        loss, norm, valid, stop = pending.result.read()
        self.stop = self.stop or stop
        split, readings = pending.lap.seconds(), self._sensors.read()
        seconds = sum(time for part, time in split.items() if part not in BESIDE)
        speed = self._tokens / seconds
        done = pending.step + 1
        tokens = self._start.tokens + (done - self._start.step) * self._tokens
        values = {
            "loss": loss,
            "grad_norm": norm,
            **pending.values,
            "tokens": tokens,
            "valid_tokens": valid,
            "tokens_per_second": speed,
            "mfu": speed * self._flops / self._peak,
            "memory": used_memory(self._runtime.device),
            "step_seconds": seconds,
            **{f"time/{part}": time for part, time in split.items()},
            **{f"gpu/{name}": value for name, value in readings.items()},
        }
        self._recorder.step(done, values)
        self._display.step(done, values)
        for incident in self._judges.observe(pending.step, tokens, loss, norm):
            self.event(done, incident.kind, incident.text, **incident.facts)
        if news := self._speed.observe(split, readings):
            self.event(done, "slow-down" if news.kind == "slow" else "speed", str(news), **news.facts())
