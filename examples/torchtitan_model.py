"""A Llama as torchtitan's models are built, on fasttrain's kernels: each block compiled, and sharded by FSDP2 under
torchrun.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fasttrain_kernels import (
    LinearCrossEntropyLoss,
    RMSNorm,
    attention,
    qk_norm_rope,
    rotary_table,
    swiglu,
)


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, C)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        q, k = qk_norm_rope(q, k, None, None, cos, sin)  # no norm: RoPE alone, as Llama
        return self.wo(attention(q, k, v).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, hidden_dim: int) -> None:
        super().__init__()
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.feed_forward = FeedForward(dim, hidden_dim)
        self.attention_norm, self.ffn_norm = RMSNorm(dim, eps=1e-5), RMSNorm(dim, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, *, dim: int, n_layers: int, n_heads: int, n_kv_heads: int, vocab_size: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        blocks = {str(i): TransformerBlock(dim, n_heads, n_kv_heads, 3 * dim) for i in range(n_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = RMSNorm(dim, eps=1e-5)
        self.output = LinearCrossEntropyLoss(dim, vocab_size)  # the head and its loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # (B, T), (B, T)
        cos, sin = rotary_table(tokens.shape[1], self.head_dim, theta=500_000.0, device=tokens.device)
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, cos, sin)
        return self.output(self.norm(x), labels)


def parallelize(model: Transformer, *, compiled: bool) -> Transformer:
    for block in model.layers.values():
        if compiled:
            block.compile(fullgraph=True)
        if dist.is_initialized():
            fully_shard(block)
    return fully_shard(model) if dist.is_initialized() else model


def main(steps: int = 20, *, compiled: bool = True) -> list[float]:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            torch.cuda.set_device(device := torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    model = Transformer(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64).to(device)
    model = parallelize(model, compiled=compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        sequence = (torch.randint(64, (8, 1)) + torch.arange(33)).to(device) % 64
        loss = model(sequence[:, :-1], sequence[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    print("loss:", ", ".join(f"{loss:.2f}" for loss in main()[::4]))
