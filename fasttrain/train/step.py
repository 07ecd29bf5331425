"""One step: forward and backward of each micro-batch, clipping, the update. The host never waits for the device.

The gradient of a step is that of the mean loss over all valid tokens of the step,

    sum of losses / number of valid tokens,     both over every micro-batch of every rank,

so it does not depend on how ranks and micro-batches split the step. Every rank's random state is a function of seed,
step and rank: there is none to save, and a step that is repeated draws the same dropout.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttrain.data.batches import IGNORED, Batch
from fasttrain.distributed.collectives import sum_over_ranks
from fasttrain.distributed.parallelize import before_backward
from fasttrain.distributed.runtime import seed_step as seed_step  # replaced by tests of what may happen in a step
from fasttrain.distributed.runtime import to_host
from fasttrain.metrics.step_timer import StepTimer
from fasttrain.optim.optimizer import clip, gradient_norms, set_learning_rate, skip_unless_finite, tensors_of
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
    lr = set_learning_rate(state.optimizer, settings.optim, step, settings.batch.steps)
    seed_step(settings.seed, step, runtime.dp_rank)
    # Counted on the host, before the copy: only the sum over ranks is the device's work.
    valid = sum(int((micro.targets != IGNORED).sum()) for micro in micro_batches)
    counted = math.nan if flags.read_failed else valid  # nan makes the loss of all ranks nan, and skips the update
    # Pinned: from pageable memory the host would wait for the device.
    counts = torch.tensor([counted, *flags], dtype=torch.float64, pin_memory=runtime.device.type == "cuda")
    inputs: list[Any] = [counts, *(each for micro in micro_batches for each in micro.inputs())]
    work: Callable[..., Tensor] = functools.partial(_update, state, timer)
    if state.graph:
        values = state.graph(work, inputs, tensors_of(state.optimizer))
        timer.mark("step")
    else:
        values = work(*(x.to(runtime.device, non_blocking=True) if isinstance(x, Tensor) else x for x in inputs))
    state.advance()
    host, ready = to_host(values)
    return StepResult(step=step + 1, lr=lr, values=host, ready=ready)


def _update(state: TrainState, timer: StepTimer, totals: Tensor, *inputs: Any) -> Tensor:
    """What the device does in a step, with nothing that the host would wait for; the values of a StepResult."""
    runtime, model, optimizer, scaler = state.runtime, state.model, state.optimizer, state.scaler
    sum_over_ranks(totals, runtime.dp_group)
    timer.mark("wait")  # for the last rank to get here
    num_tokens = totals[0].to(torch.float32)
    loss = torch.zeros((), dtype=torch.float32, device=runtime.device)
    for number, micro in enumerate(zip(*[iter(inputs)] * 5, strict=True), 1):
        before_backward(model, state.settings.parallel, last=5 * number == len(inputs))
        mean = model(*micro) / num_tokens
        timer.mark("forward")
        scaler.scale(mean).backward()
        timer.mark("backward")
        loss += mean.detach()
    scaler.unscale_(optimizer)
    norms = gradient_norms(model.norm_groups)
    weights = [weight for group in model.norm_groups for weight in group]
    norm = clip(weights, state.settings.optim.clip, norms)
    if not scaler.is_enabled():
        skip_unless_finite(optimizer, norm)
    scaler.step(optimizer)
    scaler.update()
    for weight in weights:
        weight.grad = None
    timer.mark("optimizer")
    sum_over_ranks(loss := loss.to(torch.float64), runtime.dp_group)
    return torch.cat([torch.stack([loss, norm.to(torch.float64)]), totals, norms[:-1].to(torch.float64)])
