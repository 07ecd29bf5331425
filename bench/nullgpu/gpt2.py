"""A GPT-2 style model and loop in plain PyTorch: what fasttrain's host time and launches are compared with.

    python -m bench.nullgpu bench/nullgpu/gpt2.py [--eager]

Autocast to bfloat16, SDPA, fused AdamW, clipping, the whole model compiled: what a careful user writes first. It only
counts: on the null GPU nothing is computed.

B sequences, T tokens each, C hidden, H heads, V vocabulary.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Attention and a GELU MLP, each behind a LayerNorm."""

    def __init__(self, C: int, H: int) -> None:
        super().__init__()
        self.heads = H
        self.norm1, self.norm2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT2(nn.Module):
    """Learned positions, a tied head, the loss over all logits at once."""

    def __init__(self, layers: int, C: int, H: int, T: int, V: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)
        self.layers = nn.ModuleList(Layer(C, H) for _ in range(layers))
        self.norm = nn.LayerNorm(C, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (B, T) each -> ()
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=32)
    asked = parser.parse_args()
    B, T, V = asked.sequences, 1024, 50_304
    with torch.device("cuda"):
        model = GPT2(12, 768, 12, T, V)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, fused=True)
    called = model if asked.eager else torch.compile(model)
    batch = torch.zeros(B, T + 1, dtype=torch.int64)
    for _ in range(asked.steps):
        tokens, targets = (
            x.contiguous().pin_memory().to("cuda", non_blocking=True) for x in (batch[:, :-1], batch[:, 1:])
        )
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = called(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
