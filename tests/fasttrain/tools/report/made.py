"""Runs as their directories look, of any length, without training."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.checkpoint.committed import Checkpoint
from fasttrain.config import BatchConfig, Config, OptimConfig
from fasttrain.config_toml import to_toml
from fasttrain.fs import FileChecksum
from tests.fasttrain.checkpoint.subject import NO_TENSORS

BEGAN = 1_700_000_000.0
PARTS = {"data": 0.002, "wait": 0.001, "forward": 0.1, "backward": 0.2, "optimizer": 0.02, "record": 0.001}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def steps(first: int, last: int, *, blocks: int = 0, seed: int = 0, raised: float = 0.0) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; steps count from 1."""
    noise = np.random.default_rng(seed).standard_normal((last - first + 1, 4))
    lines = []
    for step, (a, b, c, d) in zip(range(first, last + 1), noise.tolist(), strict=True):
        seconds = {part: time * (1 + 0.05 * abs(c)) for part, time in PARTS.items()}
        line = {
            "step": step,
            "time": BEGAN + step * 0.35,
            "loss": 2.5 + 8 / (1 + step / 60) ** 0.5 + 0.05 * a + raised,
            "grad_norm": 0.6 * math.exp(0.25 * b) * (1 + raised),
            "lr": 1e-3 * min(step / 50, 1),
            "tokens": step * 4096,
            "valid_tokens": 4090,
            "epoch": step / 1000,
            "tokens_per_second": 12000 + 300 * c,
            "mfu": 0.41 + 0.01 * c,
            "memory": 3.2e9,
            "step_seconds": sum(seconds.values()),
            "unsaved_steps": step % 100,
            "checkpoint_age": step % 100 * 0.35,
            **{f"time/{part}": time for part, time in seconds.items()},
            "gpu/utilisation": 0.97 + 0.01 * d,
        }
        lines.append(line | {f"block_norm/{i:02}": 0.2 * (1 + i) * math.exp(0.2 * d) for i in range(blocks)})
    return lines


def validations(last: int, every: int, name: str = "held-out", offset: float = 0.1) -> list[dict[str, Any]]:
    return [
        {"step": step, "time": BEGAN + step * 0.35, "set": name, "loss": 2.5 + 8 / (1 + step / 60) ** 0.5 + offset}
        for step in range(every, last + 1, every)
    ]


def event_line(step: int, kind: str, text: str, **more: Any) -> dict[str, Any]:
    return {"step": step, "time": BEGAN + step * 0.35, "kind": kind, "text": text, **more}


def make_run(
    path: Path,
    length: int = 300,
    *,
    planned: int | None = None,
    lr: float = 1e-3,
    blocks: int = 0,
    seed: int = 0,
    events: Iterable[dict[str, Any]] = (),
) -> Path:
    """A run that has done `length` of `planned` steps, and is not running."""
    path.mkdir(parents=True)
    config = Config(out=path, batch=BatchConfig(steps=planned or length), optim=OptimConfig(lr=lr, warmup=1))
    (path / "config.toml").write_text(to_toml(config))
    write_lines(path / "metrics.jsonl", steps(1, length, blocks=blocks, seed=seed))
    write_lines(path / "validation.jsonl", validations(length, max(length // 12, 1)))
    metadata = dict(torch="2.13.0", world_size=8, hardware="8 x NVIDIA H100 80GB HBM3", parameters=12_345_678)
    started = event_line(0, "start", f"a new run in {path}", **metadata)
    write_lines(path / "events.jsonl", [started, *events])
    for step in (length // 3, length // 3 * 2, length):
        make_checkpoint(path, step, loss=3.0 - step / length)
    return path


def make_checkpoint(run: Path, step: int, loss: float | None = None) -> Path:
    directory = run / "checkpoints" / f"step-{step:08}"
    directory.mkdir(parents=True)
    files = []
    for name, content in {"weights": b"x" * 2000, ".metadata": NO_TENSORS}.items():
        (directory / name).write_bytes(content)
        files.append(FileChecksum(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest()))
    given: dict[str, Any] = dict(optimizer="AdamW", scaler={}, metadata={}, files=tuple(files))
    Checkpoint(path=directory, step=step, loss=loss, **given).write()
    return directory
