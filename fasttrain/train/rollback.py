"""A rollback: back to good weights, and past the batches that may have caused a spike.

    checkpoint ... good steps ... | rise ........ anomaly |
                               ^--- skipped -------------^

The damage was done by an update before the loss rose, so a few steps before the rise are skipped too. Good is a
checkpoint from before them. Later ones are quarantined, not deleted.
"""

from dataclasses import asdict, replace

from fasttrain.checkpoint import Checkpoint, committed_paths, list_checkpoints, newest_valid, quarantine, restore
from fasttrain.data import Batch, Prefetcher, Skip
from fasttrain.events import Anomaly, Event, EventKind
from fasttrain.metrics import News, Rewind
from fasttrain.monitor import Monitor, diagnose
from fasttrain.train.control import Control, Decision
from fasttrain.train.results import Results
from fasttrain.train.setup import init_weights
from fasttrain.train.state import Progress, TrainState

BEFORE = 2  # steps before the rise that are skipped too


def handle_anomaly(
    state: TrainState, control: Control, results: Results, loader: Prefetcher[list[Batch]], news: list[News]
) -> Decision:
    """Do what control decides about a spike; CONTINUE if the step then ends as any other."""
    decision, anomaly, completed = control.decide_on_anomaly(), control.anomaly, state.progress.step
    if decision is Decision.SKIP_BATCHES and anomaly:
        news.append(skip_batches(state, anomaly))
        control.anomaly, decision = None, Decision.CONTINUE
        loader.forget()
    elif decision is Decision.ROLL_BACK and anomaly:
        news += control.poll_saves(wait=True)
        events = roll_back(state, anomaly)
        if not events:
            return control.stop(", and no checkpoint is from before that; keep more of them (checkpoint.keep_last)")
        news += [Rewind(state.progress.step), *events]
        results.drop()
        control.rewind()
        control.save(at=completed)  # a process that restarts from here must know of the skip
        loader.forget()
    return decision


def roll_back(state: TrainState, anomaly: Anomaly) -> list[Event]:
    """Return to the last good state and skip the batches since; an empty list if there is none. All ranks call it.

    No save is running. The caller saves the result at once: a process that restarts from here must know of the skip.
    """
    completed, begins, runtime = state.progress.step, state.progress.cursor.step, state.runtime
    events: list[Event] = []
    found = _good_state(state, anomaly, events)
    if found is None:
        return []
    restored, good = found
    later = [one for one in list_checkpoints(state.rundir.checkpoints) if one.step > restored.step]
    quarantine(later, runtime.checkpoint_group)
    skip = skip_after(anomaly, restored=restored.step, completed=completed)
    skipped = range(skip.step, skip.step + skip.steps)
    documents = state.documents_of(skipped)
    diagnosis = diagnose(state.model, state.micro_batches, skip, anomaly, runtime, begins=begins)
    state.progress = replace(restored, rollbacks=state.progress.rollbacks + 1)
    state.skip_batches(skip)
    text = (
        f"rolled back to {good.path if good else 'the initial weights'}, skipping the batches of steps "
        f"{skip.step + 1} to {skip.step + skip.steps}; {diagnosis}"
    )
    evidence = dict(diagnosis=asdict(diagnosis), skipped=list(skip), **anomaly.evidence())
    action, kind = f"rolls back to step {restored.step}, skips {skip.steps} batches", EventKind.ROLLBACK
    event = Event(step=anomaly.step, kind=kind, text=text, action=action, documents=documents, evidence=evidence)
    return [*events, event]


def skip_batches(state: TrainState, anomaly: Anomaly) -> Event:
    """Take later batches from here on, as many later as the rise has lasted; the weights stay."""
    completed = state.progress.step
    skip = Skip(completed, max(anomaly.steps, 1))
    documents = state.documents_of(range(skip.step, skip.step + skip.steps))
    state.skip_batches(skip)
    return Event(
        step=completed, kind=EventKind.SKIP, text=f"skipped the batches of the next {skip.steps} steps",
        action=f"skips {skip.steps} batches", documents=documents,
        evidence=dict(skipped=list(skip), **anomaly.evidence()),
    )  # fmt: skip


def skip_after(anomaly: Anomaly, *, restored: int, completed: int) -> Skip:
    """The batches to skip; restored, completed: steps of the checkpoint, and steps when the anomaly was handled."""
    first = max(_before(anomaly), restored)
    return Skip(first, completed - first)


def _before(anomaly: Anomaly) -> int:
    return max(anomaly.first - BEFORE, 0)


def _good_state(state: TrainState, anomaly: Anomaly, events: list[Event]) -> tuple[Progress, Checkpoint | None] | None:
    """Restore the newest valid checkpoint from before the rise, or the initial weights; None: there is neither.

    Only if there is none from before it, one from the steps just before the rise. Checkpoints from before the data
    cursor are of other batches. None as the checkpoint: the initial weights.
    """
    directory, begins = state.rundir.checkpoints, state.progress.cursor.step
    corrupt: list[str] = []
    for last in (_before(anomaly), anomaly.first):
        steps = range(begins, last + 1)
        if good := newest_valid(directory, state.runtime.checkpoint_group, corrupt.append, steps=steps):
            break
    completed, kind, action = state.progress.step, EventKind.CORRUPT_CHECKPOINT, "rolls back to an earlier one"
    events += [Event(step=completed, kind=kind, text=text, action=action) for text in dict.fromkeys(corrupt)]
    if good is None and state.resumed_from is not None and state.resumed_from.parent != directory:
        good = Checkpoint.read(state.resumed_from)  # of another run
    if good is not None:
        group = state.runtime.checkpoint_group
        metadata = restore(good, state.model, state.optimizer, state.scaler, group=group)
        state.monitor.restore(metadata["monitor"])
        return replace(Progress.of(metadata["progress"]), cursor=state.progress.cursor), good
    if begins > 0 or committed_paths(directory):  # the initial weights would lose more than these steps
        return None
    init_weights(state.model, state.settings)
    state.optimizer.state.clear()
    vocab = state.model.embedding.num_embeddings
    state.monitor.restore(Monitor(state.settings, vocab=vocab).state())
    return Progress(), None
