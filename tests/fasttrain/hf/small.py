"""Runs small enough to export many of them, on data of plain bytes: 257 tokens, an embedding of 320 rows."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

import fasttrain.hf.names
import fasttrain.model
from fasttrain.checkpoint.committed import Checkpoint, find
from fasttrain.checkpoint.state import restore
from fasttrain.data.prepare.tokenizer import plain_bytes
from fasttrain.hf.export import describe
from fasttrain.model import Decoder
from tests.datasets import DatasetWriter
from tests.ranks import run_ranks
from tests.runs import finish

ROWS, SEPARATOR, SEQUENCE = 320, 256, 32
SIZES = [
    *("--model.layers", "2", "--model.hidden", "24", "--model.heads", "4", "--model.kv_heads", "2"),
    *("--model.head_dim", "8", "--model.ffn", "40", "--model.init_std", "0.1"),
]
RUN = [
    *("--data.sequence", str(SEQUENCE), "--batch.sequences", "4", "--batch.micro", "2", "--batch.steps", "2"),
    *("--optim.warmup", "1", "--optim.lr", "0.05", "--validation.sequences", "2", "--validation.sample", ""),
    *("--log.tensorboard", "False", "--log.report", "False", "--data.lint", "off"),
]
VARIANTS: dict[str, list[Any]] = {
    "qwen3": [],
    "qwen3 untied": ["--model.tied_head", False, "--model.rope_theta", 1e6],
    "llama": ["--model.qk_norm", False, "--model.norm_eps", 1e-5],
    "llama untied, one kv head": ["--model.qk_norm", False, "--model.tied_head", False, "--model.kv_heads", 1],
}


def dataset(path: Path) -> Path:
    """Some source text, byte by byte."""
    tokenizer = plain_bytes()
    with DatasetWriter(
        path, tokenizer=tokenizer.json, vocab=tokenizer.size, separator=tokenizer.separator, source="a test"
    ) as writer:
        for split, module in (("train", fasttrain.model), ("validation", fasttrain.hf.names)):
            for paragraph in inspect.getsource(module).split("\n\n"):
                tokens = torch.tensor(list(paragraph.encode())).numpy()
                writer.add(split, tokens, num_bytes=len(tokens))
    return path


def train(out: Path, data: Path, *options: Any, world: int = 1) -> Path:
    """A finished run."""
    argv = [*RUN, "--data.path", str(data), "--out", str(out), *map(str, options)]
    if world > 1:
        run_ranks(finish, world, argv)
    else:
        finish(argv)
    return out


def decoder(checkpoint: Checkpoint) -> Decoder:
    """The model of a run, from its own files."""
    source = describe(checkpoint, "none")
    model = Decoder(source.settings.model, vocab=source.vocab, sequence=SEQUENCE)
    restore(checkpoint, model)
    return model.eval()


def last(run: Path) -> Decoder:
    return decoder(find(run))
