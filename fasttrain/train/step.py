"""One step: forward and backward of each micro-batch, clipping, the update. The host never waits for the device.

The gradient of a step is that of the mean loss over all valid tokens of the step,

    sum of losses / number of valid tokens,     both over every micro-batch of every rank,

so it does not depend on how ranks and micro-batches split the step. Every rank's random state is a function of seed,
step and rank: there is none to save, and a step that is repeated draws the same dropout.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fasttrain.data.batches import IGNORED, Batch
from fasttrain.distributed.parallelize import before_backward
from fasttrain.metrics.step_timer import StepTimer
from fasttrain.optim.optimizer import clip, gradient_norms, set_learning_rate, skip_unless_finite
from fasttrain.train.state import TrainState


class StepFlags(NamedTuple):
    """What a rank tells the others with a step."""

    stop: bool = False  # it was asked to end the run
    save_failed: bool = False  # it knows that the last save failed
    read_failed: bool = False  # it could not read its batch: nobody updates the weights


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Figures over all ranks, which can be read once the device has got there."""

    step: int  # steps completed, this one included
    lr: float
    values: Tensor  # (6 + blocks,) float64 on the host
    ready: torch.cuda.Event | None

    def read(self) -> list[float]:
        """Loss, gradient norm before clipping, valid tokens, how many ranks have each flag, norms of the blocks."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.values.tolist()


def train_step(
    state: TrainState,
    micro_batches: Sequence[Batch],
    timer: StepTimer,
    flags: StepFlags = StepFlags(),  # noqa: B008
) -> StepResult:
    """Update the model by one step."""
    settings, runtime, step = state.settings, state.runtime, state.progress.step
    model, optimizer, scaler = state.model, state.optimizer, state.scaler
    lr = set_learning_rate(optimizer, settings.optim, step, settings.batch.steps)
    seed_step(settings.seed, step, runtime.dp_rank)
    # Counted on the host, before the copy: only the sum over ranks is the device's work.
    valid = sum(int((micro.targets != IGNORED).sum()) for micro in micro_batches)
    counted = math.nan if flags.read_failed else valid  # nan makes the loss of all ranks nan, and skips the update
    counts = torch.tensor([counted, *flags], dtype=torch.float64, pin_memory=runtime.device.type == "cuda")
    totals = counts.to(runtime.device, non_blocking=True)  # from pageable memory the host would wait for the device
    dist.all_reduce(totals, group=runtime.dp_group)
    timer.mark("wait")  # for the last rank to get here
    num_tokens = totals[0].to(torch.float32)
    loss = torch.zeros((), dtype=torch.float32, device=runtime.device)
    for number, micro in enumerate(micro_batches, 1):
        before_backward(model, settings.parallel, last=number == len(micro_batches))
        batch = micro.to(runtime.device)
        mean = model(batch.tokens, batch.targets, batch.cu_seqlens, batch.positions).loss_sum / num_tokens
        timer.mark("forward")
        scaler.scale(mean).backward()
        timer.mark("backward")
        loss += mean.detach()
    scaler.unscale_(optimizer)
    norms = gradient_norms(model.norm_groups())
    norm = clip(model.parameters(), settings.optim.clip, norms)
    if not scaler.is_enabled():
        skip_unless_finite(optimizer, norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    timer.mark("optimizer")
    loss = loss.to(torch.float64)
    dist.all_reduce(loss, group=runtime.dp_group)
    values = torch.cat([torch.stack([loss, norm.to(torch.float64)]), totals, norms[:-1].to(torch.float64)])
    state.advance()
    host, ready = _to_host(values)
    return StepResult(step=step + 1, lr=lr, values=host, ready=ready)


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Set the random state of a rank's step: that of its dropout."""
    digest = hashlib.sha256(f"{seed} {step} {dp_rank}".encode()).digest()
    number = int.from_bytes(digest[:7])
    # Not torch.manual_seed, which on a machine without a GPU takes a millisecond to note a seed for each that may come.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def _to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and the event after which it is there."""
    if values.device.type != "cuda":
        return values.cpu(), None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready
