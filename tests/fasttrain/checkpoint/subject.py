"""What these tests save: a tiny decoder, sharded, with an optimizer that has taken steps; and ranks to do it on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fasttrain import config
from fasttrain.checkpoint.committed import Checkpoint
from fasttrain.checkpoint.saver import Checkpoints, Saved
from fasttrain.fs import FileChecksum, sha256_of
from fasttrain.model import Decoder
from fasttrain.optim.optimizer import make_optimizer, make_scaler
from tests import ranks

CPU = torch.device("cpu")
TINY = config.ModelConfig(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=48, tied_head=False)
VOCAB = 67  # odd, so that shards differ in size
FACTS = {"seed": 3, "tokens": 2**60 + 1, "loss": 0.1 + 0.2, "skipped": [[1, 2]], "name": "ä"}
KEEP_ALL = config.CheckpointConfig(keep_last=99)


NO_TENSORS = pickle.dumps(Metadata(state_dict_metadata={}))  # a .metadata that describes nothing


def checksums(directory: Path) -> tuple[FileChecksum, ...]:
    """Of the files of a checkpoint that was written by other means."""
    return tuple(FileChecksum(name=f.name, size=f.stat().st_size, sha256=sha256_of(f)) for f in directory.iterdir())


class Subject:
    """Model, optimizer and scaler of a run. steps: how many it has taken; they do not depend on the sharding."""

    def __init__(
        self,
        kind: str = "adamw",
        *,
        steps: int = 0,
        seed: int = 0,
        model: config.ModelConfig = TINY,
        mesh: tuple[int, ...] | None = None,  # (shards,) or (replicas, shards); None: shards on all ranks
    ) -> None:
        with torch.device("meta"):
            self.model = Decoder(model, vocab=VOCAB, sequence=8)
        if dist.is_initialized():
            shape = mesh or (dist.get_world_size(),)
            ranks = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for block in self.model.blocks:
                fully_shard(block, mesh=ranks)
            fully_shard(self.model, mesh=ranks)
        self.model.to_empty(device="cpu")
        self.model.init_weights(seed)
        self.section = config.OptimConfig(kind=kind, lr=1e-2)  # type: ignore[arg-type]
        self.optimizer = make_optimizer(self.model, self.section, CPU)
        self.scaler = make_scaler("fp16", CPU)
        self.scaler.scale(torch.tensor(1.0))  # the scale comes into being with the first loss
        self.steps = 0
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.steps)
            for p in self.model.parameters():
                gradient = torch.randn(p.shape, generator=generator)
                p.grad = (
                    distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient
                )
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scaler.update(2.0 ** (self.steps % 5))
            self.steps += 1

    def save(self, saver: Checkpoints, *, loss: float | None = None, metadata: dict[str, Any] = FACTS) -> None:
        saver.save(self.model, self.optimizer, self.scaler, step=self.steps, metadata=metadata, loss=loss)

    def saved(self, saver: Checkpoints, *, loss: float | None = None) -> Checkpoint:
        """Save, wait, and look at the result."""
        self.save(saver, loss=loss)
        saver.wait()
        (outcome,) = saver.poll()
        assert isinstance(outcome, Saved), outcome
        return Checkpoint.read(outcome.path)

    def tensors(self) -> dict[str, Tensor]:
        """Whole copies of weights and of the optimizer's state; the same on every rank."""
        found = {}
        for name, p in self.model.named_parameters():
            found[name] = whole(p)
            found |= {f"{name} {key}": whole(value) for key, value in self.optimizer.state.get(p, {}).items()}
        return found


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit by bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def gloo() -> dist.ProcessGroup:
    """A group for saving only."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    assert isinstance(group, dist.ProcessGroup)
    return group


def run_ranks(worker: Callable[..., None], world: int, directory: Path, *args: Any) -> None:
    """worker(group, directory, *args) on every rank."""
    ranks.run_ranks(_rank, world, worker, directory, *args, seconds=60)


def _rank(worker: Callable[..., None], directory: Path, *args: Any) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    worker(gloo(), directory, *args)
    dist.destroy_process_group()
