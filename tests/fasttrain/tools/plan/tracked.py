"""The memory of a step as torch itself counts it: the real model, its real FSDP and optimizer, on tensors without data.

A fake process group has any number of ranks, and FSDPMemTracker adds up what this rank would hold. It is torch's own
but not public, so it is used here and nowhere else: the closed form (memory.py) is what `fasttrain plan` prints, and
this is what tests hold it against. Eager only. Ops that answer with their fakes show no workspace: the chunk of logits
and the scores of a block of queries are not counted.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fasttrain import config
from fasttrain.distributed.parallelize import before_backward, parallelize
from fasttrain.distributed.runtime import DTYPES
from fasttrain.model import Decoder, run_blocks
from fasttrain.optim.optimizer import clip, make_optimizer
from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.ops.linear_cross_entropy import op as linear_cross_entropy


def tracked_peak(settings: config.Config, *, vocab: int, world: int, precision: str = "bf16") -> dict[str, int]:
    """Peak bytes of a rank in its second step, by torch's categories, and their sum as "Total"."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        mesh = _mesh(settings.parallel, world)
        with (
            FakeTensorMode(),
            kernels_on_cpu(),
            patch.object(linear_cross_entropy, "_finished", _finished),
        ):
            return _tracked(
                settings,
                vocab,
                SimpleNamespace(
                    world_size=world,
                    dp_size=world,
                    dtype=DTYPES[precision],
                    precision=precision,
                    mesh=mesh,
                    device=torch.device("cpu"),
                ),
            )
    finally:
        dist.destroy_process_group()


def _finished(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As the op does with data. For tensors without, it takes the way of torch.compile, which has memory of its own."""
    return grad if grad.dtype == dtype else torch.empty(grad.shape, dtype=dtype, device=grad.device)


def _mesh(parallel: config.ParallelConfig, world: int) -> DeviceMesh:
    shape = (world,) if parallel.dp_replicate == 1 else (parallel.dp_replicate, world // parallel.dp_replicate)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _tracked(settings: config.Config, vocab: int, runtime: Any) -> dict[str, int]:
    parallel, batch = settings.parallel, settings.batch
    with torch.device("meta"):
        model = Decoder(settings.model, vocab=vocab, sequence=settings.data.sequence)
    parallelize(model, parallel, runtime, compiled=False)
    model.units = [(len(model.blocks), partial(run_blocks, model.blocks))]  # the tracker knows FSDP by a module's hooks
    model.to_empty(device="cpu")
    optimizer = make_optimizer(model, settings.optim, torch.device("cpu"))
    tokens, targets = (torch.zeros(batch.micro, settings.data.sequence, dtype=torch.int64) for _ in range(2))
    tracker = FSDPMemTracker(model, optimizer)
    micro_batches = batch.sequences // (batch.micro * runtime.dp_size)

    def step() -> None:
        for number in range(1, micro_batches + 1):
            tracker.reset_mod_stats()  # it takes a second forward for a mistake otherwise
            before_backward(model, parallel, last=number == micro_batches)
            model(tokens, targets).backward()
        clip(model.parameters(), settings.optim.clip)
        optimizer.step()
        optimizer.zero_grad()

    step()  # without a first step, the optimizer's state is counted unsharded
    with tracker:
        step()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return {str(getattr(key, "value", key)): size for key, size in snapshot.items()}
