"""What a run says of itself, on the terminal and in its files, as it goes.

A step's results are read while the next one is already under way, so that the host never waits for the device. Every
rank reads them, and therefore knows at the same step that the run is to stop; the first one prints and writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

from fasttrain.checkpoint import Failed, Outcome
from fasttrain.config import Config, to_toml
from fasttrain.data.locate import documents_of
from fasttrain.distributed.runtime import Runtime
from fasttrain.metrics import Display, Event, GpuSensors, Lap, Recorder, device_memory, peak_flops, used_memory
from fasttrain.model import flops_per_token, num_parameters
from fasttrain.monitor import Facts, Judges, Speed, Utilisation
from fasttrain.tools.report import write_report
from fasttrain.tools.report.events import LEVELS
from fasttrain.tools.validation import Score
from fasttrain.train.resume import Progress
from fasttrain.train.step import StepResult

PARTS = ("data", "wait", "forward", "backward", "optimizer", "record", "checkpoint")  # that may become slow
PAGES = 30.0  # seconds between two pages about the run, at least: as often as a page that is looked at loads itself
BESIDE = ("validation", "checkpoint", "profile")  # parts of a lap that do not count as the step


class _Pending(NamedTuple):
    step: int
    result: StepResult
    lap: Lap
    values: dict[str, float]


class Journal:
    """Use as a context."""

    def __init__(
        self, settings: Config, runtime: Runtime, progress: Progress, judges: Judges, *, vocab: int, compiled: bool
    ) -> None:
        self.stop = False
        """A rank was asked to end the run."""
        self.unsaved_at = -1
        """The last step of which all ranks said that the last save had failed."""
        self._pending: _Pending | None = None
        self._start, self._runtime, self._judges = progress, runtime, judges
        self._saved_step, self._saved_at = progress.step, monotonic()  # of the last verified checkpoint
        self._tokens = settings.batch.sequences * settings.data.sequence  # of a step
        self._flops = flops_per_token(settings.model, vocab, settings.data.sequence)
        peak = peak_flops(runtime.device, runtime.dtype)
        self._peak = peak * runtime.world
        self._sensors = GpuSensors(runtime.device)
        self._speed = Speed(PARTS, runtime.figures, runtime.device, threshold=settings.watch.slowdown)
        self._utilisation = Utilisation(
            Facts(
                settings=settings,
                parameters=num_parameters(settings.model, vocab).blocks // settings.model.layers,
                peak=peak,
                compiled=compiled,
                device=runtime.device.type,
                precision=runtime.precision,
                world=runtime.world,
            )
        )
        self._settings = settings
        self._next_page = 0.0  # when it is due
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
        self._saved_step = min(self._saved_step, step)
        self._recorder.close(0)
        self._recorder = self._new_recorder(step)

    def validation(self, step: int, name: str, score: Score, suspicion: str) -> None:
        figures = dict(loss=score.loss, perplexity=score.perplexity)
        if score.bits_per_byte is not None:
            figures["bits_per_byte"] = score.bits_per_byte
        self._recorder.validation(step, name, figures | dict(accuracy=score.accuracy))
        self._display.validation(step, name, **figures)
        if suspicion:
            self.event(step, "validation", f"{name}: {suspicion}", evidence=figures)

    def save(self, outcome: Outcome) -> None:
        """What became of a checkpoint."""
        if outcome.pruned:
            names = ", ".join(outcome.pruned)
            self.event(outcome.step, "pruned", f"there was no room for a checkpoint without {names}", action="deleted")
        if isinstance(outcome, Failed):
            text = f"the checkpoint could not be saved: {outcome.error}"
            self.event(
                outcome.step, "failed save", text, action="tries again", evidence=dict(last_saved=self._saved_step)
            )
            return
        self._saved_step, self._saved_at = outcome.step, monotonic() - outcome.seconds
        size = f"{outcome.bytes / 1e6:,.0f} MB in {outcome.seconds:.1f} s"
        self.note(f"step {outcome.step}: saved and verified {outcome.path} ({size})")
        self.refresh_page()
        if outcome.trouble:
            self.event(outcome.step, "retention", outcome.trouble, action="goes on")

    def event(
        self,
        step: int,
        kind: str,
        text: str,
        *,
        action: str = "",  # what the run does about it
        evidence: Mapping[str, Any] = MappingProxyType({}),
        documents: Sequence[str] = (),
    ) -> None:
        """Something that happened: a line on the terminal and in incidents.jsonl, a mark in the curves."""
        self._recorder.event(
            Event(
                step=step,
                tokens=self._tokens_at(step),
                kind=kind,
                text=text,
                action=action,
                evidence=dict(evidence),
                documents=documents,
            )
        )
        show = self._display.note if LEVELS.get(kind) == "note" else self._display.incident
        show(f"step {step}: {text}")

    def sample(self, step: int, text: str) -> None:
        """What the model writes."""
        self._recorder.event(Event(step=step, tokens=self._tokens_at(step), kind="sample", text=text))
        self._display.note(f"a sample:\n{text}\n")

    def note(self, text: str) -> None:
        """A line on the terminal."""
        self._display.note(text)

    def close(self, exit_code: int) -> None:
        self.flush()
        self._display.close()
        self._recorder.close(exit_code)
        self.refresh_page(running=False)

    def abandon(self) -> None:
        """After an error: the terminal is given back, and W&B learns of it. Nothing happens if it was closed."""
        self._display.close()
        self._recorder.close(1)

    def refresh_page(self, *, running: bool = True) -> None:
        """The run's own report; not too often, since it takes some 50 ms."""
        out, now = self._settings.out, monotonic()
        if self._settings.log.report and self._runtime.is_first and (not running or now >= self._next_page):
            self._next_page = now + PAGES
            write_report([out], out / "report.html", running=running)

    def documents_of(self, steps: Iterable[int]) -> list[str]:
        """What steps trained on, for an event; on the rank that writes it."""
        return documents_of(self._settings.out, steps) if self._runtime.is_first else []

    def _new_recorder(self, step: int) -> Recorder:
        settings, rank = self._settings, self._runtime.rank
        return Recorder(settings.out, settings.log, config_toml=to_toml(settings), resume_step=step, rank=rank)

    def _tokens_at(self, step: int) -> int:
        return self._start.tokens + (step - self._start.step) * self._tokens

    def _tell(self, pending: _Pending) -> None:
        figures = pending.result.read()
        self.stop = self.stop or figures.stop
        if figures.unsaved:
            self.unsaved_at = pending.step
        split, readings = pending.lap.seconds(), self._sensors.read()
        own = {part: time for part, time in split.items() if part not in BESIDE}
        seconds = sum(own.values())
        speed = self._tokens / seconds
        done = pending.step + 1
        mfu, memory = speed * self._flops / self._peak, used_memory(self._runtime.device)
        values = {
            "loss": figures.loss,
            "grad_norm": figures.norm,
            **pending.values,
            "tokens": self._tokens_at(done),
            "valid_tokens": figures.tokens,
            "tokens_per_second": speed,
            "mfu": mfu,
            "memory": memory,
            "unsaved_steps": done - self._saved_step,
            "checkpoint_age": monotonic() - self._saved_at,
            "step_seconds": seconds,
            **{f"time/{part}": time for part, time in split.items()},
            **{f"gpu/{name}": value for name, value in readings.items()},
            **{f"block_norm/{block:02}": norm for block, norm in enumerate(figures.block_norms)},
        }
        self._recorder.step(done, values)
        self._display.step(done, values)
        for incident in self._judges.observe(
            pending.step, self._tokens_at(done), figures.loss, figures.norm, figures.block_norms
        ):
            involved = () if incident.began is None else self.documents_of(range(incident.began, done))
            self.event(
                done,
                incident.kind,
                incident.text,
                action=incident.action,
                evidence=incident.evidence,
                documents=involved,
            )
        if news := self._speed.observe(split, readings):
            self.event(done, "slow-down" if news.kind == "slow" else "speed", str(news), evidence=news.facts())
        total = device_memory(self._runtime.device)
        causes = self._utilisation.observe(mfu, own, memory=memory / total if total else 0.0, sensors=readings)
        if causes:
            text = "".join(f"\n    {cause}" for cause in causes)
            evidence = dict(causes=[asdict(cause) for cause in causes])
            self.event(done, "low MFU", f"the MFU is low. What it is lost to:{text}", evidence=evidence)
