"""What a run says: at its start, of its saves and validations, and at its end."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fasttrain.checkpoint.saver import Failed, Outcome
from fasttrain.config_toml import summary
from fasttrain.events import Event, EventKind, ExitCode
from fasttrain.metrics.hardware import device_name, versions
from fasttrain.metrics.jsonl import last_step
from fasttrain.metrics.record import News, Note
from fasttrain.monitor.sanity import unusual_settings
from fasttrain.train.state import TrainState
from fasttrain.units import disk_size, plural

if TYPE_CHECKING:
    from fasttrain.train.control import Control
    from fasttrain.train.setup import StartReport


def at_start(state: TrainState, report: StartReport) -> list[News]:
    """The effective configuration, where the run starts, and what has changed."""
    settings, runtime, step = state.settings, state.runtime, state.progress.step
    lines = [*summary(settings), *report.plan.lines()]
    blocks = "compiled" if report.compiled else f"not compiled ({report.why_not_compiled})"
    device = "mps, on which nobody has tried fasttrain," if runtime.device.type == "mps" else runtime.device.type
    lines.append(f"{plural(runtime.world_size, 'rank')} on {device} in {runtime.precision}; blocks are {blocks}")
    lines += ["model.deterministic is off: a resumed run may differ"] * (not settings.model.deterministic)
    lines += [*state.data.notes(), *state.batches.summary(max(settings.batch.steps, step))]
    news: list[News] = [Note(line) for line in lines]
    news += _beginning(state, report)
    for kind, texts, action in (
        (
            EventKind.PLAN,
            [*report.plan.contradictions, *report.plan.warnings, *unusual_settings(settings)],
            "continues",
        ),
        (EventKind.CORRUPT_CHECKPOINT, report.corrupt, f"resumes from {state.resumed_from} instead"),
        (EventKind.DATA, report.suspicions, "continues, as data.lint says: warn"),
    ):
        news += [Event(step=step, kind=kind, text=text, action=action) for text in texts]
    if step >= settings.batch.steps:
        steps = settings.batch.steps
        news.append(Note(f"nothing is left to do: batch.steps is {steps}; raise it, or start another run: --out"))
    return news


def _beginning(state: TrainState, report: StartReport) -> Iterator[Event]:
    settings, runtime, step = state.settings, state.runtime, state.progress.step
    evidence = dict(
        world_size=runtime.world_size, parameters=report.plan.parameters.total, hardware=device_name(runtime.device)
    )
    if state.resumed_from is None:
        text = f"a new run in {settings.out}"
        evidence |= versions()
        if settings.from_hf is not None:
            text += f", with the weights of {settings.from_hf}"
            evidence["from_hf"] = str(settings.from_hf.absolute())
        yield Event(step=step, kind=EventKind.START, text=text, evidence=evidence)
        if report.tokenizer_warning:
            yield Event(step=step, kind=EventKind.DATA, text=report.tokenizer_warning, action="continues")
        return
    evidence["lost_steps"] = lost = max(last_step(state.rundir.path) - step, 0) if runtime.is_main else 0
    text = f"resumes from {state.resumed_from}" + (f"; {plural(lost, 'step')} are repeated" if lost else "")
    yield Event(step=step, kind=EventKind.RESUME, text=text, action=f"resumes from step {step}", evidence=evidence)
    action = "takes effect from this step on"
    for change in report.changes:
        yield Event(step=step, kind=EventKind.CHANGED_SETTING, text=str(change), action=action, evidence=asdict(change))


def about_save(outcome: Outcome, *, last_saved: int) -> Iterator[News]:
    """What has become of a save."""
    step = outcome.step
    if outcome.pruned:
        text = f"there was no disk space for a checkpoint without deleting {', '.join(outcome.pruned)}"
        yield Event(step=step, kind=EventKind.PRUNED, text=text, action="deleted")
    if isinstance(outcome, Failed):
        text, evidence = f"the checkpoint could not be saved: {outcome.error}", dict(last_saved=last_saved)
        yield Event(step=step, kind=EventKind.FAILED_SAVE, text=text, action="retries", evidence=evidence)
        return
    size = f"{disk_size(outcome.bytes)} in {outcome.seconds:.1f} s"
    yield Note(f"step {step}: saved and verified {outcome.path} ({size})", saved=True)
    if outcome.trouble:
        yield Event(step=step, kind=EventKind.RETENTION, text=outcome.trouble, action="continues")


def at_end(state: TrainState, control: Control) -> tuple[int, list[News]]:
    """The exit code, and the last words."""
    progress, step, steps, signals = state.progress, state.progress.step, state.settings.batch.steps, control.signals
    code, action, evidence = int(ExitCode.FINISHED), "saved, ends the run", dict[str, Any]()
    suspects = "".join(f"; {text}" for text in unusual_settings(state.settings))
    news: list[News] = []
    if control.stop_reason:
        code, kind, action = ExitCode.STOPPED, EventKind.STOP, "ends the run"
        text = f"stopped: {control.stop_reason}; nothing was saved since{suspects}"
    elif control.save_failure:
        code, kind, action = ExitCode.NOT_SAVED, EventKind.NOT_SAVED, "ends the run"
        text = f"ended after {step} of {steps} steps, of which the last is not saved: {control.save_failure.error}"
        text += f"; it ended because {control.lost}" if control.lost else suspects * control.save_failure.is_final
    elif control.lost:
        code, kind = ExitCode.LOST_FILES, EventKind.LOST_FILES
        again = f"--out {control.rescued.path}" if control.rescued else "once the file is back, the same command"
        text = f"stopped after {step} of {steps} steps: {control.lost}; all of them are saved: {again} resumes"
    elif control.stop_requested:
        code, kind, evidence = 128 + [*signals, signal.SIGTERM][0], EventKind.SIGNAL, dict(signals=list(signals))
        text = f"stopped as asked, after {step} of {steps} steps; the same command resumes from here"
    elif not math.isfinite(control.last_loss):
        code, kind = ExitCode.STOPPED, EventKind.STOP
        text = f"ended after {step} of {steps} steps with a loss of {control.last_loss}{suspects}"
    elif step < steps:
        kind = EventKind.EARLY_STOP
        text = f"stopped: {progress.misses} validations in a row were not better than {progress.best_loss:.3f}"
    else:
        kind, action = EventKind.FINISH, ""
        text = f"finished: {step} steps, {progress.tokens:,} tokens; all of it is in {state.settings.out}"
        news = [Note(f"look at {state.rundir.report}")] if state.settings.log.report else []
        news += [Note(f"next: fasttrain generate {state.settings.out}; fasttrain data prepare, for your own text")]
    return code, [Event(step=step, kind=kind, text=text, action=action, evidence=evidence), *news]
