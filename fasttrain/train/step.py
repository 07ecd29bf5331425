"""One step: forward and backward of each micro-batch, clipping, the update. The host never waits for the device.

The gradient of a step is that of the mean loss over all valid tokens of the step,

    sum of losses / number of valid tokens,     both over every micro-batch of every rank,

so it does not depend on how ranks and micro-batches split the step. Every rank's random state is a function of seed,
step and rank: there is none to save, and a step that is repeated draws the same dropout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fasttrain import config
from fasttrain.data import IGNORED, Batch
from fasttrain.distributed.parallelize import before_backward
from fasttrain.distributed.runtime import Runtime
from fasttrain.metrics import Stopwatch
from fasttrain.model import Decoder
from fasttrain.optim import gradient_norms, leave_out_unless_finite, scale_gradients


class Figures(NamedTuple):
    """What a step was like, over all ranks."""

    loss: float
    norm: float  # of all gradients, before clipping
    block_norms: list[float]
    tokens: int  # valid ones
    stop: bool  # a rank was asked to end the run
    unsaved: bool  # every rank knows that the last save failed


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Figures that can be read once the device has got there."""

    values: Tensor  # (5 + blocks,) float64 on the host
    ready: torch.cuda.Event | None
    world: int

    def read(self) -> Figures:
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm, tokens, stop, unsaved, *block_norms = self.values.tolist()
        return Figures(
            loss=loss, norm=norm, block_norms=block_norms, tokens=int(tokens), stop=stop > 0,
            unsaved=unsaved == self.world,
        )  # fmt: skip


def run_step(
    model: Decoder,
    micro_batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    settings: config.Config,
    runtime: Runtime,
    watch: Stopwatch,
    stop: bool,  # this rank was asked to end the run
    unsaved: bool,  # this rank knows that the last save failed
) -> StepResult:
    """Update the model by one step."""
    # Counted on the host, before the copy: only the sum over ranks is the device's work.
    valid = sum(int((micro.targets != IGNORED).sum()) for micro in micro_batches)
    totals = torch.tensor([valid, stop, unsaved], dtype=torch.float64, device=runtime.device)
    dist.all_reduce(totals)
    watch.mark("wait")  # for the last rank to get here
    num_tokens = totals[0].to(torch.float32)
    loss = torch.zeros((), dtype=torch.float32, device=runtime.device)
    for number, micro in enumerate(micro_batches, 1):
        before_backward(model, settings.parallel, last=number == len(micro_batches))
        batch = micro.to(runtime.device)
        mean = model(batch.tokens, batch.targets, batch.cu_seqlens, batch.positions).loss_sum / num_tokens
        watch.mark("forward")
        scaler.scale(mean).backward()
        watch.mark("backward")
        loss += mean.detach()
    scaler.unscale_(optimizer)
    norms = gradient_norms(model.parts())
    norm = scale_gradients(model.parameters(), norms, settings.optim.clip)
    if not scaler.is_enabled():
        leave_out_unless_finite(optimizer, norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    watch.mark("optimizer")
    loss = loss.to(torch.float64)
    dist.all_reduce(loss)
    values = torch.cat([torch.stack([loss, norm.to(torch.float64)]), totals, norms[:-1].to(torch.float64)])
    return _on_its_way(values, runtime.world)


def seed_step(seed: int, step: int, rank: int) -> None:
    """The random state of a rank's step: of its dropout."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    number = int.from_bytes(digest[:7])
    # Not torch.manual_seed, which on a machine without a GPU takes a millisecond to note a seed for each that may come.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def _on_its_way(values: Tensor, world: int) -> StepResult:
    if values.device.type == "cpu":
        return StepResult(values=values, ready=None, world=world)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return StepResult(values=host, ready=ready, world=world)
