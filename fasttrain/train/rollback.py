"""What a run does about a spike: back to good weights, and past the batches that may have caused it.

    checkpoint ... good steps ... | rise ........ alarm |
                               ^--- skipped -----------^

The damage was done by an update before the loss rose, so that a few steps before the rise are skipped too. Good is a
checkpoint from before them. Later ones are set aside, not deleted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fasttrain.checkpoint import Checkpoint, list_checkpoints, newest_sound, set_aside
from fasttrain.data import Batch, Skip
from fasttrain.distributed.runtime import Runtime
from fasttrain.model import Decoder
from fasttrain.monitor import Alarm

BEFORE = 2  # steps before the rise that are skipped too
REPLAYED = 6  # steps of the skipped ones that are tried on the restored weights
COMPARED = 3  # and of those before

Read = Callable[[int], Sequence[Batch]]


def last_good(
    directory: Path, alarm: Alarm, begins: int, runtime: Runtime, report: Callable[[str], None]
) -> Checkpoint | None:
    """The newest sound checkpoint from before the rise; only if there is none, one from the steps just before it.

    begins: the step from which on the run has had its batches; older checkpoints are of other ones.
    """
    for last in (_before(alarm), alarm.first):
        if good := newest_sound(directory, runtime.files, report, steps=range(begins, last + 1)):
            return good
    return None


def give_up_after(directory: Path, step: int, runtime: Runtime) -> None:
    """Set the checkpoints of later steps aside: a restart would resume from them."""
    set_aside([checkpoint for checkpoint in list_checkpoints(directory) if checkpoint.step > step], runtime.files)


def skip_after(alarm: Alarm, *, restored: int, done: int) -> Skip:
    """restored: steps of the checkpoint; done: steps when the alarm was seen to."""
    first = max(_before(alarm), restored)
    return Skip(first, done - first)


def _before(alarm: Alarm) -> int:
    return max(alarm.first - BEFORE, 0)


@dataclass(frozen=True)
class Diagnosis:
    """Whether the batches or the weights were bad."""

    is_data: bool
    step: int  # of the worst batch
    loss: float  # of that batch on the restored weights
    usual: float  # of batches before, on the same weights

    def __str__(self) -> str:
        losses = f"loss {self.loss:.3f} on the restored weights, where batches before it have {self.usual:.3f}"
        if self.is_data:
            return f"bad data: the batch of step {self.step + 1} has {losses}"
        return (
            f"bad state, not bad data: no skipped batch stands out (the worst, of step {self.step + 1}, has {losses})"
        )


def diagnose(model: Decoder, read: Read, skip: Skip, alarm: Alarm, runtime: Runtime, *, begins: int) -> Diagnosis:
    """Replay skipped batches, and some before them, on restored weights. All ranks call it; `read` as before the skip.

    Data is bad if at least half of the rise shows on good weights.
    """
    replayed = range(skip.step, skip.step + min(skip.steps, BEFORE + REPLAYED))
    compared = range(max(skip.step - COMPARED, begins), skip.step)
    model.eval()
    losses = {step: _mean_loss(model, read(step), runtime) for step in (*compared, *replayed)}
    model.train()
    worst = max(replayed, key=lambda step: math.inf if math.isnan(losses[step]) else losses[step])
    usual = statistics.median(losses[step] for step in compared) if compared else alarm.verdict.expected
    rise = alarm.verdict.value - alarm.verdict.expected  # nan: not finite
    loss = losses[worst]
    is_data = not math.isfinite(loss) or loss - usual > max(rise / 2, 0.0)
    return Diagnosis(is_data=is_data, step=worst, loss=loss, usual=usual)


@torch.no_grad()
def _mean_loss(model: Decoder, micro_batches: Iterable[Batch], runtime: Runtime) -> float:
    total = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    for micro in micro_batches:
        batch = micro.to(runtime.device)
        loss = model(batch.tokens, batch.targets, batch.cu_seqlens, batch.positions)
        total += torch.stack([loss.loss_sum.double(), loss.num_tokens.double()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
