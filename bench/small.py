"""Small models on a CPU: nanoGPT's recipe for a laptop, ours and a GPT-2 in plain PyTorch, on the same characters.

4 layers, hidden 128, 4 heads, 12 x 64 characters a step, 2,000 steps, AdamW with warm-up and cosine, float32. The text
is Python's standard library: ASCII, a token a character. Ours is the trainer's model and optimizer on the same batches.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.nullgpu.plain import Model, Sizes
from fasttrain.config import ModelConfig, OptimConfig
from fasttrain.distributed.runtime import keep_freed_memory
from fasttrain.model import Decoder
from fasttrain.optim.optimizer import clip, make_optimizer, set_learning_rate

B, T, V = 12, 64, 128
STEPS, WARMUP = 2_000, 100
CHARACTERS = 4_000_000
HELD_OUT = 20  # the last twentieth is for validation
CPU = torch.device("cpu")


class Trained(NamedTuple):
    """A model with its training step."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]  # mean, of (B, T) each
    step: Callable[[int, Tensor], None]  # its number, and (B, T + 1) characters


class Text:
    """The characters, and windows of them."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "".join(text for text in (file.read_text("utf-8") for file in files) if text.isascii())
        tokens = torch.frombuffer(bytearray(text[:CHARACTERS].encode()), dtype=torch.uint8).long()
        held_out = len(tokens) // HELD_OUT
        self._train, rest = tokens[:-held_out], tokens[-held_out:]
        self.validation = rest[: (len(rest) // (T + 1)) * (T + 1)].view(-1, T + 1)

    def batch(self, seed: int, step: int) -> Tensor:  # (B, T + 1)
        generator = torch.Generator().manual_seed(seed * STEPS + step)
        begins = torch.randint(len(self._train) - T, (B, 1), generator=generator)
        return self._train[begins + torch.arange(T + 1)]


def gpt2(seed: int, *, compiled: bool = False, hidden: int = 128, layers: int = 4) -> Trained:
    """nanoGPT's architecture and settings in plain PyTorch."""
    torch.manual_seed(seed)
    model = Model(Sizes(layers, hidden, 4, 4, hidden // 4, 4 * hidden, V), T, is_gpt2=True)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            narrow = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if narrow else 0.02)
    matrices, norms = ([p for p in model.parameters() if (p.dim() > 1) is large] for large in (True, False))
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=norms, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    called = torch.compile(model) if compiled else model

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return called(tokens, targets)[1]

    def step(number: int, windows: Tensor) -> None:
        left = max((number - WARMUP) / (STEPS - WARMUP), 0)
        lr = 1e-3 * min((number + 1) / (WARMUP + 1), 0.1 + 0.45 * (1 + math.cos(math.pi * left)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        loss(windows[:, :-1], windows[:, 1:].contiguous()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Trained(model, loss, step)


def ours(seed: int, optim: OptimConfig, *, steps: int = STEPS, hidden: int = 128, layers: int = 4) -> Trained:
    """The trainer's model, optimizer and schedule, uncompiled."""
    keep_freed_memory()
    sizes = ModelConfig(
        layers=layers, hidden=hidden, heads=4, kv_heads=4, head_dim=hidden // 4, ffn=3 * hidden, vocab=V
    )
    with torch.device("meta"):
        model = Decoder(sizes, vocab=V, sequence=T)
    model.to_empty(device=CPU).init_weights(seed)
    optimizer = make_optimizer(model, optim, CPU)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, targets) / targets.numel()

    def step(number: int, windows: Tensor) -> None:
        set_learning_rate(optimizer, optim, number, steps)
        loss(windows[:, :-1], windows[:, 1:]).backward()
        clip(model.parameters(), optim.clip)
        optimizer.step()
        for weight in model.parameters():
            weight.grad = None

    return Trained(model, loss, step)


@torch.no_grad()
def validation(trained: Trained, text: Text) -> float:
    """The mean loss of the held-out characters, in nats."""
    chunks = text.validation.split(256)
    losses = [trained.loss(chunk[:, :-1], chunk[:, 1:].contiguous()).item() * len(chunk) for chunk in chunks]
    return sum(losses) / len(text.validation)


def seconds_of_steps(trained: Trained, batches: Sequence[Tensor]) -> float:
    """CPU time of a step on each."""
    begin = time.process_time()
    for number, windows in enumerate(batches):
        trained.step(number, windows)
    return time.process_time() - begin
