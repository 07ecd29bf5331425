"""Muon against AdamW: tokens and time to the validation loss that AdamW ends at, on the default corpus.

    python -m pytest bench/test_muon.py -p no:xdist -s --long       (-k 128: 10 minutes or more; -k 384: 35 or more)

Both runs are the trainer's own, from its first step to its last, at 16k tokens a step: on recipe tiny's model, hidden
128, and on one of hidden 384 and 6 layers. Each has a schedule of its own length, so Muon's fewer tokens are those of a
finished run, not of a point on a longer one. AdamW's settings are the best found (docs/log.md has the searches). Muon
had half as many tries at 128, and one at 384. Time is CPU time of the steps, which a busy machine disturbs least.
"""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bench.figures import Figure, ratio, seconds
from fasttrain import train
from fasttrain.train import loop
from fasttrain.train.step import train_step

TOKENS, TIME = 0.65, 0.8  # at most, of AdamW's
SHARED: dict[str, Any] = {
    "recipe": "tiny",
    "batch.sequences": 64,  # x 256 = 16k tokens
    "parallel.device": "cpu",
    "parallel.compile": "on",  # auto would compile the longer run only
    "validation.every": 0,
    "validation.sequences": 256,
    "validation.sample": "",
    "checkpoint.every": 0,
    "log.every": 20,
    "log.tensorboard": False,
}
ADAMW = {
    "batch.steps": 80,
    "optim.kind": "adamw",
    "optim.lr": 5.6e-3,
    "optim.betas": (0.9, 0.9),
    "optim.warmup": 30,
}
MUON = {
    "batch.steps": 52,
    "optim.kind": "muon",
    "optim.lr": 1.6e-2,  # of embedding and norms: higher than AdamW can stand for a whole model
    "optim.muon_lr": 0.02,
    "optim.betas": (0.9, 0.9),
    "optim.warmup": 20,
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and what differs for it."""

    model: dict[str, object]
    adamw: dict[str, object]
    muon: dict[str, object]


SIZES = {
    128: Size(model={"seed": 1, "data.seed": 1}, adamw={}, muon={}),
    384: Size(
        model={
            "model.layers": 6, "model.hidden": 384, "model.heads": 6, "model.kv_heads": 6, "model.head_dim": 64,
            "model.ffn": 1024, "batch.micro": 16,
        },
        adamw={"batch.steps": 60, "optim.lr": 1.4e-3, "optim.warmup": 20},
        muon={"batch.steps": 39, "optim.warmup": 15},
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The final loss of a run, and its cost."""

    loss: float
    steps: int
    step_seconds: float

    @property
    def seconds(self) -> float:
        return self.steps * self.step_seconds

    def row(self) -> dict[str, float | Figure]:
        tokens = self.steps * SHARED["batch.sequences"] * 256
        times = {"CPU": seconds(self.seconds), "CPU of a step": seconds(self.step_seconds)}
        return {"loss": self.loss, "M tokens": tokens / 1e6} | times


def run(directory: Path, settings: dict[str, object]) -> RunOutcome:
    """A whole run of the training command, in this process."""
    torch.compiler.reset()  # each run compiles for itself
    options = SHARED | settings | {"out": directory}
    with cpu_seconds_of_steps() as taken:
        assert train.main(arguments(options)) == 0
    # The mean excludes the first step, which compiles, from an empty cache or a full one.
    return RunOutcome(loss=final_loss(directory), steps=len(taken), step_seconds=statistics.fmean(taken[1:]))


def arguments(options: dict[str, object]) -> list[str]:
    values = {key: value if isinstance(value, tuple) else (value,) for key, value in options.items()}
    return [text for key, parts in values.items() for text in (f"--{key}", *map(str, parts))]


@contextmanager
def cpu_seconds_of_steps() -> Iterator[list[float]]:
    """CPU time of each step: forward, backward, update, and the data read meanwhile; not validation, not saving."""
    taken: list[float] = []

    def timed(*args, **kwargs):
        begin = time.process_time()
        result = train_step(*args, **kwargs)
        taken.append(time.process_time() - begin)
        return result

    with patch.object(loop, "train_step", timed):
        yield taken


def final_loss(directory: Path) -> float:
    return json.loads((directory / "validation.jsonl").read_text().splitlines()[-1])["loss"]


@pytest.mark.long
@pytest.mark.parametrize("hidden", SIZES)
def test_muon_reaches_the_loss_of_adamw_with_fewer_tokens_and_in_less_time(tmp_path, report, hidden):
    torch.set_num_threads(1)
    size = SIZES[hidden]
    adamw = run(tmp_path / "adamw", size.model | ADAMW | size.adamw)
    muon = run(tmp_path / "muon", size.model | MUON | size.muon)
    assert muon.loss <= adamw.loss
    report(
        f"muon_{hidden}: against the best AdamW found, hidden {hidden}, 16k tokens a step, one thread",
        {
            "AdamW": adamw.row(),
            "Muon": muon.row(),
            "ratio": {
                "tokens": ratio(muon.steps / adamw.steps, at_most=TOKENS),
                "CPU time": ratio(muon.seconds / adamw.seconds, at_most=TIME),
            },
        },
    )
