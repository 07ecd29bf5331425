"""The training loop: batch -> step -> record -> monitor -> control, and between steps: validate, save, roll back."""

from collections.abc import Iterable, Sequence

from fasttrain.checkpoint.saver import Checkpoints
from fasttrain.data.batches import Prefetcher
from fasttrain.metrics.logger import RunLogger
from fasttrain.metrics.record import News, Note, StepRecord
from fasttrain.metrics.step_timer import StepTimer
from fasttrain.tools.profiling import Profiler
from fasttrain.tools.validation import ValidationSet
from fasttrain.train.control import Control, Decision
from fasttrain.train.messages import at_end
from fasttrain.train.results import Results
from fasttrain.train.rollback import handle_anomaly
from fasttrain.train.state import TrainState
from fasttrain.train.step import train_step
from fasttrain.train.validate import sample, validate


def train(
    state: TrainState, validation: dict[str, ValidationSet], results: Results, logger: RunLogger, signals: Sequence[int]
) -> int:
    """All steps that are left; the exit code. The logger is entered once a step, with the news of that step."""
    settings, runtime, rundir, timer = state.settings, state.runtime, state.rundir, StepTimer(state.runtime.device)
    profiler = Profiler(
        rundir.profile, runtime, steps=settings.log.profile, completed=state.progress.step,
        on_progress=lambda line: logger.write([Note(line)]),
    )  # fmt: skip
    with (
        Prefetcher(state.micro_batches, ahead=settings.data.prefetch, stop=settings.batch.steps) as loader,
        Checkpoints(rundir.checkpoints, settings.checkpoint, group=runtime.checkpoint_group, lock=rundir.lock) as saver,
        profiler,
        runtime.hang_detector.naming_failed_ranks(),  # innermost: closing what is above may itself hang then
    ):
        control = Control(state, saver, signals)
        timer.mark("start")
        timer.end_step()
        for step in state.remaining():
            if logger.attempt("profiler", profiler.begin_step):
                timer.mark("profile")
            micro_batches = loader.at(step)
            timer.mark("data")
            result = train_step(state, micro_batches, timer, control.flags(micro_batches))
            profiler.end_step(phases := timer.end_step())
            validates = is_due(step + 1, settings.validation.every, settings.batch.steps)
            saves = is_due(step + 1, settings.checkpoint.every, settings.batch.steps)
            values = dict(data_wait=loader.waited, **state.epochs_at(step), **control.save_age())
            news = observe(results.push(result, phases, values, wait=validates or saves), state, control)
            timer.mark("record")
            loss = None
            if validates and control.unread is None:
                try:
                    loss = validate(state, validation, news)
                except OSError as error:  # of whatever rank: all of them have it
                    control.lost, control.unread = str(error), state.progress.step
                news += logger.attempt("sample", lambda: sample(state)) or []
                timer.mark("validation")
            if control.unread is not None:
                logger.write(news)
                break
            decision = handle_anomaly(state, control, results, loader, news)
            ends = control.is_ending  # after a rollback it is not
            if decision is Decision.CONTINUE:
                news += control.poll_saves(wait=saves)  # a save waits for the one before anyway
                decision = control.decide_on_save(due=saves)
                if decision is Decision.SAVE:
                    control.save(loss)
                elif decision is Decision.PAUSE:
                    pause(control, logger, news)
                news += control.poll_saves()
                timer.mark("checkpoint")
            logger.write(news)
            if ends or decision is Decision.EXIT:
                break
        if not control.stop_reason:
            news = control.end()
            if control.needs_pause():
                pause(control, logger, news)
            logger.write(news)
    news = observe(results.flush(), state, control)
    code, last = at_end(state, control)
    logger.write([*news, *last])
    logger.close(code)
    return code


def is_due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)


def observe(records: Iterable[StepRecord], state: TrainState, control: Control) -> list[News]:
    """What the monitor finds in records, noted by control; the news for the logger."""
    news: list[News] = []
    for record in records:
        events = [] if record.read_failed else state.monitor.observe(record)
        control.note(record, events)
        news += [] if record.read_failed else [record, *events]
    return news


def pause(control: Control, logger: RunLogger, news: list[News]) -> None:
    """Tell at once what happens while the run waits."""
    for said in control.pause():
        logger.write([*news, *said])
        news.clear()
