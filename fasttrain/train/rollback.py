"""A rollback: back to good weights, and past the batches that may have caused a spike.

    checkpoint ... good steps ... | rise ........ anomaly |
                               ^--- skipped -------------^

The damage was done by an update before the loss rose, so a few steps before the rise are skipped too. Good is a
checkpoint from before them. Later ones are quarantined, not deleted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from fasttrain.checkpoint import Checkpoint, committed_paths, list_checkpoints, newest_valid, quarantine, restore
from fasttrain.data import Batch, Prefetcher, Skip
from fasttrain.events import Anomaly, Event, EventKind
from fasttrain.metrics import News, Rewind
from fasttrain.monitor import Monitor
from fasttrain.train.control import Control, Decision
from fasttrain.train.results import Results
from fasttrain.train.setup import init_weights
from fasttrain.train.state import Progress, TrainState

BEFORE = 2  # steps before the rise that are skipped too
REPLAYED = 6  # steps of the skipped ones that are replayed on the restored weights
COMPARED = 3  # and of those before


def handle_anomaly(
    state: TrainState, control: Control, results: Results, loader: Prefetcher[list[Batch]], news: list[News]
) -> Decision:
    """Do what control decides about a spike; CONTINUE if the step then ends as any other."""
    decision, anomaly, completed = control.decide_on_anomaly(), control.anomaly, state.progress.step
    if decision is Decision.SKIP_BATCHES:
        assert anomaly
        news.append(skip_batches(state, anomaly))
        control.anomaly, decision = None, Decision.CONTINUE
        loader.forget()
    elif decision is Decision.ROLL_BACK:
        assert anomaly
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
    completed, events = state.progress.step, list[Event]()
    found = _good_state(state, anomaly, events)
    if found is None:
        return []
    restored, good = found
    directory, group = state.rundir.checkpoints, state.runtime.checkpoint_group
    quarantine([later for later in list_checkpoints(directory) if later.step > restored.step], group)
    skip = skip_after(anomaly, restored=restored.step, completed=completed)
    skipped = range(skip.step, skip.step + skip.steps)
    documents, diagnosis = state.documents_of(skipped), diagnose(state, skip, anomaly)
    state.progress = replace(restored, rollbacks=state.progress.rollbacks + 1)
    state.skip_batches(skip)
    text = (
        f"rolled back to {good.path if good else 'the initial weights'}, skipping the batches of steps "
        f"{skip.step + 1} to {skip.step + skip.steps}; {diagnosis}"
    )
    evidence = dict(diagnosis=asdict(diagnosis), skipped=list(skip), **anomaly.evidence())
    action = f"rolls back to step {restored.step}, skips {skip.steps} batches"
    kind = EventKind.ROLLBACK
    return [
        *events,
        Event(step=anomaly.step, kind=kind, text=text, action=action, documents=documents, evidence=evidence),
    ]


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
    completed, action = state.progress.step, "rolls back to an earlier one"
    kind = EventKind.CORRUPT_CHECKPOINT
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


@dataclass(frozen=True)
class Diagnosis:
    """Whether the batches or the weights were bad."""

    is_data: bool
    step: int  # steps completed before the worst batch
    loss: float  # of that batch on the restored weights
    usual: float  # of batches before, on the same weights

    def __str__(self) -> str:
        losses = f"loss {self.loss:.3f} on the restored weights, where batches before it have {self.usual:.3f}"
        if self.is_data:
            return f"bad data: the batch of step {self.step + 1} has {losses}"
        return (
            f"bad state, not bad data: no skipped batch stands out (the worst, of step {self.step + 1}, has {losses})"
        )


def diagnose(state: TrainState, skip: Skip, anomaly: Anomaly) -> Diagnosis:
    """Replay skipped batches, and some before them, on restored weights. All ranks call it, before the skip.

    Data is bad if at least half of the rise shows on good weights.
    """
    replayed = range(skip.step, skip.step + min(skip.steps, BEFORE + REPLAYED))
    compared = range(max(skip.step - COMPARED, state.progress.cursor.step), skip.step)
    state.model.eval()
    losses = {step: _mean_loss(state, state.micro_batches(step)) for step in (*compared, *replayed)}
    state.model.train()
    worst = max(replayed, key=lambda step: math.inf if math.isnan(losses[step]) else losses[step])
    usual = statistics.median(losses[step] for step in compared) if compared else anomaly.expected
    rise = anomaly.value - anomaly.expected  # nan: not finite
    loss = losses[worst]
    is_data = not math.isfinite(loss) or loss - usual > max(rise / 2, 0.0)
    return Diagnosis(is_data=is_data, step=worst, loss=loss, usual=usual)


@torch.no_grad()
def _mean_loss(state: TrainState, micro_batches: Iterable[Batch]) -> float:
    total = torch.zeros(2, dtype=torch.float64, device=state.runtime.device)
    for micro in micro_batches:
        batch = micro.to(state.runtime.device)
        loss = state.model(batch.tokens, batch.targets, batch.cu_seqlens, batch.positions)
        total += torch.stack([loss.loss_sum.double(), loss.num_tokens.double()])
    dist.all_reduce(total, group=state.runtime.dp_group)
    return (total[0] / total[1]).item()
