"""Bad data or bad weights? Batches before a spike are replayed on restored weights."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fasttrain.data.batches import IGNORED, Batch
from fasttrain.distributed.runtime import Runtime
from fasttrain.events import Anomaly
from fasttrain.model import Decoder

REPLAYED = 8  # steps of the skipped ones that are replayed on the restored weights
COMPARED = 3  # and of those before

Read = Callable[[int], Sequence[Batch]]


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
        return f"bad state, not bad data: no skipped batch stands out (the worst, of step {self.step + 1}: {losses})"


def diagnose(
    model: Decoder, read: Read, skipped: range, anomaly: Anomaly, runtime: Runtime, *, begins: int
) -> Diagnosis:
    """Replay skipped batches, and some before them, on restored weights. All ranks call it.

    read: gives the batches as before the skip; begins: the step from which on the run has had its batches.
    Data is bad if at least half of the rise shows on good weights.
    """
    replayed = skipped[:REPLAYED]
    compared = range(max(skipped.start - COMPARED, begins), skipped.start)
    model.eval()
    losses = {step: _mean_loss(model, read(step), runtime) for step in (*compared, *replayed)}
    model.train()
    worst = max(replayed, key=lambda step: math.inf if math.isnan(losses[step]) else losses[step])
    usual = statistics.median(losses[step] for step in compared) if compared else anomaly.expected
    rise = anomaly.value - anomaly.expected  # nan: not finite
    loss = losses[worst]
    is_data = not math.isfinite(loss) or loss - usual > max(rise / 2, 0.0)
    return Diagnosis(is_data=is_data, step=worst, loss=loss, usual=usual)


@torch.no_grad()
def _mean_loss(model: Decoder, micro_batches: Iterable[Batch], runtime: Runtime) -> float:
    total = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    for micro in micro_batches:
        batch = micro.to(runtime.device)
        loss = model(*batch.inputs())
        total += torch.stack([loss.double(), (batch.targets != IGNORED).sum()])
    dist.all_reduce(total, group=runtime.dp_group)
    return (total[0] / total[1]).item()
