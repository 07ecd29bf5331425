"""Makes the recorded curves: python tests/fasttrain/monitor/recorded/record.py NAME [...]

Real runs of a 0.4M-parameter decoder on Python's standard library, of a few minutes on one core each. A curve is
NAME.json: loss and gradient norm of each step, and what was done.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from fasttrain.metrics.jsonl import read_metrics
from fasttrain.train import main
from fasttrain.train.state import TrainState

SMALL = (
    "--model.layers 2 --model.hidden 64 --model.heads 4 --model.kv_heads 2 --model.head_dim 16 --model.ffn 192 "
    "--data.sequence 128 --batch.sequences 8 --batch.micro 8 --log.tensorboard False --parallel.compile off "
    "--validation.every 0 --checkpoint.every 0 --validation.sample= "
)
CONSTANT = "--optim.schedule constant "
RUNS = {  # what a run is made of: commands in the same directory, one after the other
    "ordinary": ["--batch.steps 400 --optim.lr 3e-3"],
    "small_batch": [CONSTANT + "--batch.steps 400 --optim.lr 3e-3 --batch.sequences 2 --batch.micro 2"],
    "muon": ["--batch.steps 250 --optim.kind muon"],
    "no_warmup": ["--batch.steps 250 --optim.warmup 0 --optim.lr 1e-2"],
    "long_warmup": ["--batch.steps 250 --model.layers 6 --optim.warmup 100 --optim.lr 3e-3"],
    "hot": [
        CONSTANT + "--batch.steps 300 --optim.lr 0.1 --optim.warmup 150 --optim.clip 0 --model.qk_norm False "
        "--batch.sequences 4 --batch.micro 4"
    ],
    "rate_raised": [  # a learning rate that is raised a hundredfold
        CONSTANT + "--batch.steps 160 --optim.lr 3e-3",
        CONSTANT + "--batch.steps 220 --optim.lr 0.3",
    ],
    "poisoned": ["--batch.steps 250 --optim.lr 3e-3"],  # steps 180 to 185, counted from 0, are random tokens
}


def poison() -> None:
    read = TrainState.micro_batches

    def read_poisoned(run: TrainState, step: int) -> list:
        batches = read(run, step)
        if not 180 <= step < 186:
            return batches
        generator = torch.Generator().manual_seed(step)
        return [
            replace(batch, **{name: _random(getattr(batch, name), generator) for name in ("tokens", "targets")})  # type: ignore[arg-type]
            for batch in batches
        ]

    TrainState.micro_batches = read_poisoned  # type: ignore[assignment]


def _random(tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 4000, tokens.shape, generator=generator).to(tokens.dtype)


def record(name: str) -> None:
    if name == "poisoned":
        poison()
    with tempfile.TemporaryDirectory() as run:
        for command in RUNS[name]:
            main([*shlex.split(SMALL + command), "--out", run])
        steps = read_metrics(Path(run))
    curve = {key: [float(f"{step[key]:.4g}") for step in steps] for key in ("loss", "grad_norm")}
    content = json.dumps({"commands": RUNS[name], **curve}) + "\n"
    Path(__file__).with_name(f"{name}.json").write_text(content)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        record(name)
