"""Small runs of the training command, and what they leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.metrics.jsonl import read_events, read_metrics
from fasttrain.train import main
from tests.ranks import run_ranks

SMALL = [
    *("--model.layers", "2", "--model.hidden", "32", "--model.heads", "4", "--model.kv_heads", "2"),
    *("--model.head_dim", "8", "--model.ffn", "48", "--data.sequence", "32", "--batch.sequences", "8"),
    *("--batch.micro", "2", "--batch.steps", "6", "--optim.warmup", "2", "--checkpoint.every", "3"),
    *("--validation.every", "3", "--validation.sequences", "7", "--validation.sample_tokens", "3"),
    *("--log.tensorboard", "False"),
]


def command(run: Path, *options: Any) -> list[str]:
    return [*SMALL, "--out", str(run), *map(str, options)]


def train(run: Path, *options: Any, world: int = 1) -> list[dict[str, float]]:
    """The metrics of a finished run."""
    if world == 1:
        assert main(command(run, *options)) == 0
    else:
        run_ranks(finish, world, command(run, *options))
    return read_metrics(run)


def finish(argv: list[str]) -> None:
    assert main(argv) == 0


def curve(metrics: list[dict[str, float]], name: str = "loss") -> list[float]:
    return [line[name] for line in metrics]


def weights(run: Path) -> dict[str, Any]:
    """Model and optimizer of the last checkpoint, whole."""
    path = list_checkpoints(run / "checkpoints")[-1].path
    state: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(path),
        planner=dcp.default_planner._EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return state


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in events.jsonl."""
    return [line for line in read_events(run) if line["kind"] == kind]
