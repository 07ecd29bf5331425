"""Models and a loop in plain PyTorch: what fasttrain's host time, launches and memory are compared with.

    python -m bench.nullgpu bench/nullgpu/plain.py [--model gpt2 | qwen3-124m | qwen3-0.6b] [--eager]
    python -m bench.nullgpu --ranks 8 bench/nullgpu/plain.py --model qwen3-0.6b --fsdp

What a careful user writes first. On one GPU, in nanoGPT's manner: windows of a mapped file, bfloat16 by autocast, SDPA,
fused AdamW, clipping, the whole model compiled, logits beside the loss. With --fsdp, in torchtitan's: FSDP2, each block
compiled. It only counts: on the null GPU nothing is computed.

B sequences, T tokens each, C hidden, H heads, K heads of keys and values, D of a head, F of the MLP, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

TOKENS = 4_000_000  # of the file


class Sizes(NamedTuple):
    """Of a model."""

    layers: int
    C: int
    H: int
    K: int
    D: int
    F: int
    V: int


MODELS = {
    "gpt2": Sizes(12, 768, 12, 12, 64, 3072, 50_304),
    "qwen3-124m": Sizes(12, 768, 12, 12, 64, 2048, 50_304),
    "qwen3-0.6b": Sizes(28, 1024, 16, 8, 128, 3072, 151_936),
}


class GPT2Block(nn.Module):
    """Attention and a GELU MLP, each behind a LayerNorm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        C, self.H = sizes.C, sizes.H
        self.norm1, self.norm2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.up, self.down = nn.Linear(C, sizes.F, bias=False), nn.Linear(sizes.F, C, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, C), (T, D / 2) twice: not used
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * self.H, -1)).transpose(1, 2).chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Qwen3Block(nn.Module):
    """Attention with normed and rotated queries and keys, and a gated MLP, each behind an RMSNorm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        _, C, H, K, self.D, width, _ = sizes
        self.norm1, self.norm2, self.q_norm, self.k_norm = (nn.RMSNorm(n, eps=1e-6) for n in (C, C, self.D, self.D))
        self.q, self.k, self.v = (nn.Linear(C, heads * self.D, bias=False) for heads in (H, K, K))
        self.out = nn.Linear(H * self.D, C, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(C, width, False),
            nn.Linear(C, width, False),
            nn.Linear(width, C, False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, C), (T, D / 2) twice
        normed = self.norm1(x)
        q, k, v = (y(normed).unflatten(-1, (-1, self.D)).transpose(1, 2) for y in (self.q, self.k, self.v))
        q, k = rotated(self.q_norm(q), cos, sin), rotated(self.k_norm(k), cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, H, T, D), (T, D / 2) twice
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class Model(nn.Module):
    """A tied head, the loss over all logits at once."""

    def __init__(self, sizes: Sizes, T: int, *, is_gpt2: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.V, sizes.C)
        self.positions = nn.Embedding(T, sizes.C) if is_gpt2 else None
        self.blocks = nn.ModuleList((GPT2Block if is_gpt2 else Qwen3Block)(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.C, bias=False) if is_gpt2 else nn.RMSNorm(sizes.C, eps=1e-6)
        angles = torch.outer(torch.arange(T), 1e6 ** -torch.linspace(0, 1, sizes.D // 2))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # (B, T) each -> (B, T, V), ()
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(path: str, B: int, T: int) -> list[Tensor]:  # tokens, targets: (B, T) each
    data = np.memmap(path, dtype=np.uint16, mode="r")
    begins = torch.randint(len(data) - T, (B,)).tolist()
    both = ([torch.from_numpy(data[i + shift : i + shift + T].astype(np.int64)) for i in begins] for shift in (0, 1))
    return [torch.stack(rows).pin_memory().to("cuda", non_blocking=True) for rows in both]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--fsdp", action="store_true", help="several ranks: FSDP2, and each block compiled")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=32, help="of a rank")
    parser.add_argument("--length", type=int, default=1024)
    asked = parser.parse_args()
    sizes, B, T = MODELS[asked.model], asked.sequences, asked.length
    if asked.fsdp:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    with torch.device("cuda"):
        model = Model(sizes, T, is_gpt2=asked.model == "gpt2")
    called: Callable[..., tuple[Tensor, Tensor]] = model
    if asked.fsdp:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            if not asked.eager:
                block.compile(fullgraph=True)
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    elif not asked.eager:
        called = torch.compile(model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, fused=True)
    with tempfile.NamedTemporaryFile() as file:
        np.random.default_rng(0).integers(0, 50_000, TOKENS, dtype=np.uint16).tofile(file.name)
        for step in range(asked.steps):
            tokens, targets = batch(file.name, B, T)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not asked.fsdp):
                _logits, loss = called(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 10 == 0:
                loss.item()
    if asked.fsdp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
