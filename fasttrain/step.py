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

import torch
import torch.distributed as dist
from torch import Tensor

from fasttrain import config
from fasttrain.data import IGNORED, Batch
from fasttrain.metrics import Stopwatch
from fasttrain.model import Decoder
from fasttrain.optim import clip, leave_out_unless_finite
from fasttrain.parallel import before_backward
from fasttrain.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step was like, over all ranks; to be read once the device has got there."""

    values: Tensor  # (4,) float64 on the host: mean loss, gradient norm, valid tokens, ranks that want to stop
    ready: torch.cuda.Event | None

    def read(self) -> tuple[float, float, int, bool]:
        """Loss, gradient norm before clipping, valid tokens, whether a rank wants to stop."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm, tokens, stop = self.values.tolist()
        return loss, norm, int(tokens), stop > 0


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
) -> StepResult:
    """Update the model by one step."""
    # Counted on the host, before the copy: only the sum over ranks is the device's work.
    valid = sum(int((micro.targets != IGNORED).sum()) for micro in micro_batches)
    totals = torch.tensor([valid, stop], dtype=torch.float64, device=runtime.device)
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
    norm = clip(model.parameters(), settings.optim.clip)
    if not scaler.is_enabled():
        leave_out_unless_finite(optimizer, norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    watch.mark("optimizer")
    loss = loss.to(torch.float64)
    dist.all_reduce(loss)
    return _on_its_way(torch.stack([loss, norm.to(torch.float64), totals[0], totals[1]]))


def seed_step(seed: int, step: int, rank: int) -> None:
    """The random state of a rank's step: of its dropout."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7]))


def _on_its_way(values: Tensor) -> StepResult:
    if values.device.type == "cpu":
        return StepResult(values=values, ready=None)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return StepResult(values=host, ready=ready)
