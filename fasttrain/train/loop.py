"""Train a model: `python -m fasttrain.train`, or the same under torchrun for as many devices as there are.

runtime -> run (data, model, optimizer, progress) -> steps, and between them: validate, save
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from fasttrain.checkpoint import Checkpoint, Checkpoints, published, restore
from fasttrain.config import STORED, Config, load, summary, to_toml
from fasttrain.data import Prefetcher, Skip
from fasttrain.data.segments import record
from fasttrain.distributed.hang_detector import LOST, LostRanks
from fasttrain.distributed.runtime import start
from fasttrain.metrics import Stopwatch, device_name, last_step
from fasttrain.monitor import Alarm, Judges
from fasttrain.optim import set_learning_rate
from fasttrain.process import alone_in, mistakes_without_traceback, stop_signals
from fasttrain.recipes import RECIPES
from fasttrain.tools.generate import continue_text
from fasttrain.tools.profiling import Profiler
from fasttrain.tools.validation import HELD_OUT, mean_score
from fasttrain.train.journal import Journal
from fasttrain.train.resume import CHECKPOINTS, Progress
from fasttrain.train.rollback import diagnose, give_up_after, last_good, skip_after
from fasttrain.train.saving import Saves
from fasttrain.train.setup import Run, give_initial_weights, prepare
from fasttrain.train.step import run_step, seed_step

# Exit codes; 0: finished, 1: an error of the program, 2: a mistake of the user's, 128 + n: saved and ended by signal n,
# and LOST: another rank died, or does not answer
STOPPED = 3  # by its own judges
UNSAVED = 4  # ended, and its last state is not saved


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    with mistakes_without_traceback():
        settings = load(sys.argv[1:] if argv is None else argv, RECIPES)
    try:
        return _run(settings)
    except LostRanks as lost:
        print(f"fasttrain.train: {lost}", file=sys.stderr)
        return LOST


def _run(settings: Config) -> int:
    with contextlib.ExitStack() as stack:
        with mistakes_without_traceback():
            runtime = stack.enter_context(start(settings.parallel))
            stack.enter_context(alone_in(settings.out, is_first=runtime.is_first))
            with runtime.roll_call.naming_lost_ranks():
                run = prepare(settings, runtime)
            vocab = run.model.embedding.num_embeddings
            journal = Journal(settings, runtime, run.progress, run.judges, vocab=vocab, compiled=run.compiled)
        stack.callback(journal.abandon)
        try:
            return train(run, journal)
        except LostRanks as lost:
            evidence = dict(error=str(lost.__cause__))
            journal.event(run.progress.step, "lost rank", str(lost), action="ends the run", evidence=evidence)
            journal.close(LOST)
            raise


def train(run: Run, journal: Journal) -> int:
    """All steps that are left; the exit code."""
    settings, runtime, steps = run.settings, run.runtime, run.settings.batch.steps
    watch = Stopwatch(runtime.device)
    checkpoints = Checkpoints(settings.out / CHECKPOINTS, settings.checkpoint, group=runtime.files)
    with (
        Prefetcher(run.read, ahead=settings.data.prefetch, stop=steps) as ahead,
        contextlib.closing(checkpoints),
        stop_signals() as signals,
        Profiler(
            settings.out / "profile", runtime, steps=settings.log.profile, done=run.progress.step, tell=journal.note
        ) as profiler,
        runtime.roll_call.naming_lost_ranks(),  # innermost: to close what is above may itself hang then
    ):
        save = functools.partial(run.save, checkpoints)
        saves = Saves(checkpoints, save, journal, runtime, signals, settings.checkpoint)
        _announce(run, journal)
        watch.mark("start")
        watch.lap()
        while (step := run.progress.step) < steps:
            if profiler.begin_step():
                watch.mark("profile")
            micro_batches = ahead.at(step)
            watch.mark("data")
            lr = set_learning_rate(run.optimizer, settings.optim, step, steps)
            seed_step(settings.seed, step, runtime.rank)
            result = run_step(
                run.model, micro_batches, run.optimizer, run.scaler,
                settings=settings, runtime=runtime, watch=watch, stop=bool(signals), unsaved=bool(saves.failed),
            )  # fmt: skip
            run.progress = run.progress.after_step(settings)
            epochs = {f"epoch/{name}" if name else "epoch": n for name, n in run.batches.epochs_at(step).items()}
            profiler.lap(lap := watch.lap())
            journal.step(step, result, lap, lr=lr, data_wait=ahead.waited, **epochs)
            watch.mark("record")
            loss = None
            if _due(step + 1, settings.validation.every, steps):
                loss = _validate(run, journal)
                watch.mark("validation")
            due = _due(step + 1, settings.checkpoint.every, steps)
            if due:
                journal.flush()  # the judges know all steps that the checkpoint has
            if run.judges.alarm and not journal.stop:
                if not _see_to(run.judges.alarm, run, journal, saves):
                    break
                ahead.forget()
                if run.progress.step <= step:  # it went back
                    continue
            ending = journal.stop or run.has_lost_patience
            goes_on = saves.after_step(step, due=due or ending, loss=loss)
            watch.mark("checkpoint")
            if ending or not goes_on:
                break
        if not run.stopped:
            saves.finish(run.progress.step - 1)
    return _finish(run, journal, saves, signals)


def _see_to(alarm: Alarm, run: Run, journal: Journal, saves: Saves) -> bool:
    """Do about a spike what watch.spike says; whether the run goes on. All ranks do the same."""
    settings, done = run.settings, run.progress.step
    run.judges.alarm = None
    policy = settings.watch.spike
    spiked = f"the loss spiked at step {alarm.step + 1} ({alarm.verdict})"
    if policy == "stop":
        run.stopped = spiked
    elif policy == "rollback" and run.progress.rollbacks >= settings.watch.rollbacks:
        run.stopped = f"{spiked}, again after {run.progress.rollbacks} rollbacks (watch.rollbacks)"
    elif policy == "skip":
        skip = Skip(done, max(alarm.verdict.steps, 1))
        documents = journal.documents_of(range(skip.step, skip.step + skip.steps))
        run.move(skip)
        journal.event(
            done, "skip", f"goes on past the batches of the next {skip.steps} steps",
            action=f"skips {skip.steps} batches", documents=documents,
            evidence=dict(skipped=list(skip), **alarm.verdict.facts()),
        )  # fmt: skip
    elif policy == "rollback" and not _roll_back(alarm, run, journal, saves):
        run.stopped = f"{spiked}, and no checkpoint is from before that; keep more of them (checkpoint.keep_last)"
    return not run.stopped


def _roll_back(alarm: Alarm, run: Run, journal: Journal, saves: Saves) -> bool:
    """Whether there was a place to go back to."""
    settings, runtime, done = run.settings, run.runtime, run.progress.step
    directory, begins = settings.out / CHECKPOINTS, run.progress.origin.step
    saves.wait()
    damaged: list[str] = []
    good = last_good(directory, alarm, begins, runtime, report=damaged.append)
    for text in damaged:
        journal.event(done, "damaged checkpoint", text, action="goes back to an earlier one")
    if good is None and run.came_from is not None and run.came_from.parent != directory:
        good = Checkpoint.read(run.came_from)  # of another run
    if good is not None:
        facts = restore(good, run.model, run.optimizer, run.scaler, group=runtime.files)
        progress = replace(Progress.of(facts["progress"]), origin=run.progress.origin)
        judges = facts["judges"]
    elif begins == 0 and not published(directory):  # nothing is lost but these steps
        give_initial_weights(run.model, settings)
        run.optimizer.state.clear()
        progress, judges = Progress(), Judges(settings, vocab=run.model.embedding.num_embeddings).state()
    else:
        return False
    give_up_after(directory, progress.step, runtime)
    run.judges.restore(judges)
    skip = skip_after(alarm, restored=progress.step, done=done)
    documents = journal.documents_of(range(skip.step, skip.step + skip.steps))
    diagnosis = diagnose(run.model, run.read, skip, alarm, runtime, begins=begins)
    run.progress = replace(progress, rollbacks=run.progress.rollbacks + 1)
    run.move(skip)
    journal.go_back(progress.step)
    journal.event(
        alarm.step + 1, "rollback",
        f"goes back to {good.path if good else 'the initial weights'} and skips the batches of steps "
        f"{skip.step + 1} to {skip.step + skip.steps}; {diagnosis}",
        action=f"goes back to step {progress.step}, skips {skip.steps} batches", documents=documents,
        evidence=dict(diagnosis=asdict(diagnosis), skipped=list(skip), **alarm.verdict.facts()),
    )  # fmt: skip
    saves.begin(done - 1, None)  # a process that starts again from here must know of the skip
    return True


def _validate(run: Run, journal: Journal) -> float | None:
    """Score every set, and let the model write; the loss on the held-out documents, if there are some."""
    journal.flush()
    scores = {name: samples.score(run.model) for name, samples in run.validation.items()}
    if mean := mean_score(scores, run.data.weights):
        scores[HELD_OUT] = mean
    for name, score in scores.items():
        journal.validation(run.progress.step, name, score, score.suspicion(run.data.first.vocab))
    _show_sample(run, journal)
    if HELD_OUT not in scores:
        return None
    run.progress = run.progress.after_validation(scores[HELD_OUT].loss)
    return scores[HELD_OUT].loss


def _finish(run: Run, journal: Journal, saves: Saves, signals: list[int]) -> int:
    """Last words, and the exit code."""
    progress, steps = run.progress, run.settings.batch.steps
    journal.flush()
    code = 0
    if run.stopped:
        code = STOPPED
        text = f"stopped: {run.stopped}; nothing was saved since"
        journal.event(progress.step, "stop", text, action="ends the run")
    elif saves.failed:
        code = UNSAVED
        text = f"ended after {progress.step} of {steps} steps, of which the last is not saved: {saves.failed.error}"
        journal.event(progress.step, "unsaved", text, action="ends the run")
    elif journal.stop:
        code = 128 + (signals[0] if signals else signal.SIGTERM)
        text = f"stopped as asked, after {progress.step} of {steps} steps; the same command goes on from here"
        journal.event(progress.step, "signal", text, action="saved, ends the run", evidence=dict(signals=signals))
    elif progress.step < steps:
        text = f"stopped: {progress.misses} validations in a row were not better than {progress.best_loss:.3f}"
        journal.event(progress.step, "patience", text, action="saved, ends the run")
    else:
        text = f"finished: {steps} steps, {progress.tokens:,} tokens; all of it is in {run.settings.out}"
        journal.event(progress.step, "finish", text)
        if run.settings.log.report:
            journal.note(f"look at {run.settings.out / 'report.html'}")
    journal.close(code)
    return code


def _show_sample(run: Run, journal: Journal) -> None:
    settings, tokenizer, separator = run.settings.validation, run.data.tokenizer(), run.data.first.separator
    if not settings.sample or tokenizer is None or separator is None:
        return
    text = continue_text(run.model, tokenizer, separator, settings.sample, tokens=settings.sample_tokens)
    journal.sample(run.progress.step, text)


def _announce(run: Run, journal: Journal) -> None:
    """What is about to run: the effective configuration, where it starts, and what has changed."""
    settings, runtime, step = run.settings, run.runtime, run.progress.step
    if runtime.is_first:
        (settings.out / STORED).write_text(to_toml(settings))
        record(settings.out, run.stretch())
    for line in [*summary(settings), *run.plan.lines()]:
        journal.note(line)
    journal.note(
        f"{runtime.world} rank{'s' * (runtime.world > 1)} on {runtime.device.type} in {runtime.precision}; blocks are "
        f"{'compiled' if run.compiled else f'not compiled ({run.why_not})'}"
    )
    for line in [*run.data.notes(), *_about_mixture(run)]:
        journal.note(line)
    facts = dict(world=runtime.world, parameters=run.plan.parameters.total, hardware=device_name(runtime.device))
    if run.came_from is None:
        evidence = facts | run.facts()["versions"]
        text = f"a new run in {settings.out}"
        if settings.from_hf is not None:
            text += f", with the weights of {settings.from_hf}"
            evidence["from_hf"] = str(settings.from_hf.absolute())
        journal.event(step, "start", text, evidence=evidence)
        if run.doubts:
            journal.event(step, "data", run.doubts, action="goes on")
    else:
        lost = max(last_step(settings.out) - step, 0) if runtime.is_first else 0
        text = f"goes on from {run.came_from}{f'; {lost} steps are done again' if lost else ''}"
        evidence = facts | dict(lost_steps=lost)
        journal.event(step, "resume", text, action=f"goes on from step {step}", evidence=evidence)
        for change in run.changed:
            action = "takes effect from this step on"
            journal.event(step, "changed setting", str(change), action=action, evidence=asdict(change))
    for text in [*run.plan.contradictions, *run.plan.warnings]:
        journal.event(step, "plan", text, action="goes on")
    for text in run.damaged:
        journal.event(step, "damaged checkpoint", text, action=f"goes on from {run.came_from} instead")
    for text in run.suspected:
        journal.event(step, "data", text, action="goes on, as data.lint says: warn")
    if step >= settings.batch.steps:
        journal.note(
            f"nothing is left to do: batch.steps is {settings.batch.steps}; raise it, or start another run: --out"
        )


def _about_mixture(run: Run) -> list[str]:
    """What the run will have seen of each component."""
    if not run.data.mixture:
        return []
    batches, T = run.batches, run.settings.data.sequence
    steps = max(run.settings.batch.steps, run.progress.step)
    used, epochs, dropouts = batches.used_at(steps), batches.epochs_at(steps), batches.dropouts()
    return [
        f"{name}: {used[name] / sum(used.values()):.1%} of the run, {used[name] * T:,} tokens, {epochs[name]:.3g} "
        f"epochs of {size * T:,}{f', all by step {dropouts[name]}' if dropouts.get(name, steps) < steps else ''}"
        for name, size in zip(used, batches.sizes, strict=True)
    ]


def _due(done: int, every: int, steps: int) -> bool:
    return done == steps or (every > 0 and done % every == 0)


if __name__ == "__main__":
    sys.exit(main())
