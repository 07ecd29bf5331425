"""A GPT-2 style model, as nanoGPT has it, on fasttrain's kernels: three lines differ from plain torch, each marked.

The feed-forward layers have relu(x)^2, as nanochat's; a model that was trained with gelu keeps F.gelu there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasttrain_kernels import attention, linear_cross_entropy, relu2


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attention(q, k, v).flatten(-2))  # F.scaled_dot_product_attention(..., is_causal=True)
        return x + self.down(relu2(self.up(self.norm2(x))))  # F.relu(...).square()


class GPT(nn.Module):
    def __init__(self, *, vocab: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (B, T), (B, T)
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        # F.cross_entropy(F.linear(...)), which holds all logits and their gradient
        return linear_cross_entropy(self.norm(x), self.tokens.weight, targets, ignore_index=-1)


def main(steps: int = 40) -> list[float]:
    """Learn to count modulo the vocabulary, on any device."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(vocab=64, length=32, width=64, layers=2, heads=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        sequence = (torch.randint(64, (8, 1)) + torch.arange(33)).to(device) % 64
        loss = model(sequence[:, :-1], sequence[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print("loss:", ", ".join(f"{loss:.2f}" for loss in main()[::8]))
