"""A rollback: back to good weights, and past the batches that may have caused a spike.

    checkpoint ... good steps ... | rise ........ anomaly |
                               ^--- skipped -------------^

The damage was done by an update before the loss rose, so a few steps before the rise are skipped too. Good is a
checkpoint from before them. Later ones are quarantined, not deleted.
"""

from dataclasses import asdict, replace

from fasttrain.checkpoint.committed import Checkpoint, committed_paths
from fasttrain.checkpoint.resume import go_back
from fasttrain.data.batches import Batch, Prefetcher
from fasttrain.events import Anomaly, Event, EventKind
from fasttrain.metrics.record import News, Rewind
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
        if all(event.kind is not EventKind.ROLLBACK for event in events):
            news += events
            return control.stop(", and no valid checkpoint is from before that; keep more (checkpoint.keep_last)")
        news += [Rewind(state.progress.step), *events]
        results.drop()
        control.rewind()
        control.save(at=completed)  # a process that restarts from here must know of the skip
        loader.forget()
    return decision


def roll_back(state: TrainState, anomaly: Anomaly) -> list[Event]:
    """Return to the last good state and skip the batches since; no event ROLLBACK: there is none. All ranks call it.

    No save is running. The caller saves the result at once: a process that restarts from here must know of the skip.
    """
    completed, begins = state.progress.step, state.progress.cursor.step
    events: list[Event] = []
    found = _good_state(state, anomaly, events)
    if found is None:
        return events
    restored, good = found
    skipped = skipped_after(anomaly, restored=restored.step, completed=completed)
    documents = state.documents_of(skipped)
    diagnosis = diagnose(state.model, state.micro_batches, skipped, anomaly, state.runtime, begins=begins)
    state.progress = replace(restored, rollbacks=state.progress.rollbacks + 1)
    place, steps = good.path if good else "the initial weights", f"{skipped.start + 1} to {skipped.stop}"
    text = f"rolled back to {place}, skipping the batches of steps {steps}; {diagnosis}"
    skip = state.skip_batches(skipped)
    evidence = dict(diagnosis=asdict(diagnosis), skipped=list(skip), **anomaly.evidence())
    action, kind = f"rolls back to step {restored.step}, skips {skip.steps} batches", EventKind.ROLLBACK
    event = Event(step=anomaly.step, kind=kind, text=text, action=action, documents=documents, evidence=evidence)
    return [*events, event]


def skip_batches(state: TrainState, anomaly: Anomaly) -> Event:
    """Take later batches from here on, as many later as the rise has lasted; the weights stay."""
    completed = state.progress.step
    skipped = range(completed, completed + max(anomaly.steps, 1))
    documents = state.documents_of(skipped)
    skip = state.skip_batches(skipped)
    text, action = f"skipped the batches of the next {skip.steps} steps", f"skips {skip.steps} batches"
    kind, evidence = EventKind.SKIP, dict(skipped=list(skip), **anomaly.evidence())
    return Event(step=completed, kind=kind, text=text, action=action, documents=documents, evidence=evidence)


def skipped_after(anomaly: Anomaly, *, restored: int, completed: int) -> range:
    """Steps whose batches are skipped; restored: step of the checkpoint, completed: when the anomaly was handled."""
    return range(max(_before(anomaly), restored), completed)


def _before(anomaly: Anomaly) -> int:
    return max(anomaly.first - BEFORE, 0)


def _good_state(state: TrainState, anomaly: Anomaly, events: list[Event]) -> tuple[Progress, Checkpoint | None] | None:
    """Restore the newest valid checkpoint from before the rise, or the initial weights; None: there is neither.

    Only if there is none from before it, one from the steps just before the rise. Checkpoints from before the data
    cursor are of other batches. None as the checkpoint: the initial weights.
    """
    directory, begins, origin = state.rundir.checkpoints, state.progress.cursor.step, state.resumed_from
    corrupt: list[str] = []
    good = go_back(
        directory, state.model, state.optimizer, state.scaler, state.runtime.checkpoint_group,
        steps=[range(begins, last + 1) for last in (_before(anomaly), anomaly.first)],
        origin=origin if origin and origin.parent != directory else None, on_warning=corrupt.append,
    )  # fmt: skip
    completed, kind, action = state.progress.step, EventKind.CORRUPT_CHECKPOINT, "does not roll back to it"
    events += [Event(step=completed, kind=kind, text=text, action=action) for text in dict.fromkeys(corrupt)]
    if good is not None:
        state.monitor.restore(good.metadata["monitor"])
        return replace(Progress.of(good.metadata["progress"]), cursor=state.progress.cursor), good
    if begins > 0 or origin or committed_paths(directory):  # the initial weights would lose more than these steps
        return None
    init_weights(state.model, state.settings)
    state.optimizer.state.clear()
    vocab = state.model.embedding.num_embeddings
    state.monitor.restore(Monitor(state.settings, vocab=vocab).state())
    return Progress(), None
