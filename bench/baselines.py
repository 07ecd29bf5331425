"""The training steps of the step benchmark, ours and the baselines: functions of the vocabulary that return a step.

A step is what a training loop does between two batches: clear gradients, forward, backward, clip, update. It returns
the loss. All start from the same weights, see the same tokens, and decay matrices but not norms: their losses agree.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasttrain.config import ModelConfig, OptimConfig, ParallelConfig
from fasttrain.distributed.parallelize import parallelize
from fasttrain.distributed.runtime import keep_freed_memory
from fasttrain.hf.names import huggingface_config
from fasttrain.model import Decoder
from fasttrain.optim.optimizer import clip, make_optimizer
from fasttrain_kernels import rotary_table
from tests.fasttrain.hf.names import to_huggingface

MODEL, BATCH, SEQUENCE = ModelConfig(), 8, 256
OPTIM = OptimConfig()
OPS = ("fasttrain_kernels.ops.rms_norm", "fasttrain_kernels.ops.swiglu", "fasttrain_kernels.ops.qk_norm_rope.op")

Step = Callable[[], float]


def fasttrain(vocab: int, parallel: ParallelConfig = ParallelConfig()) -> Step:  # noqa: B008  (frozen)
    """Our step as the trainer runs it, with an allocator that keeps its memory."""
    keep_freed_memory()
    model = decoder(vocab)
    alone: Any = SimpleNamespace(world_size=1, dtype=torch.float32, precision="fp32", device=torch.device("cpu"))
    parallelize(model, parallel, alone, compiled=True)
    optimizer = make_optimizer(model, OPTIM, torch.device("cpu"))
    inputs, targets = batch(vocab)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        with torch.profiler.record_function("clip"):
            clip(model.parameters(), OPTIM.clip)
        optimizer.step()
        return loss.item()

    return step


def fasttrain_selective(vocab: int) -> Step:
    """Our step with parallel.recompute = "selective": less memory, a few per cent more time."""
    return fasttrain(vocab, ParallelConfig(recompute="selective"))


def fasttrain_opaque(vocab: int) -> Step:
    """Our step if streaming ops stayed ops under torch.compile on a CPU."""
    step = fasttrain(vocab)

    def patched() -> float:
        with ExitStack() as stack:
            for name in OPS:
                stack.enter_context(patch.object(sys.modules[name], "fused_by_compiler", lambda tensor: False))
            return step()

    return patched


def plain(vocab: int, *, compiled: bool = True) -> Step:
    """The model as it is usually written, one projection for each matrix, compiled as a whole or not at all."""
    model = Plain(vocab)
    model.load_state_dict(to_huggingface(decoder(vocab).state_dict(), MODEL))
    called = torch.compile(model) if compiled else model
    inputs, targets = batch(vocab)
    return ordinary_loop(model, lambda: called(inputs, targets))


def transformers(vocab: int) -> Step:
    """Transformers' Qwen3, not compiled."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**huggingface_config(MODEL, vocab=vocab, sequence=SEQUENCE), use_cache=False))
    model.load_state_dict(to_huggingface(decoder(vocab).state_dict(), MODEL), strict=False)  # the tied head has no key
    inputs, targets = batch(vocab)
    return ordinary_loop(
        model, lambda: F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
    )


def floor(vocab: int) -> Step:
    """The matmuls of a step and of its attention, and nothing else, with fasttrain's allocator.

    Attention has its six matmuls in full: what skipping masked blocks saves is not taken off the floor.
    """
    keep_freed_memory()
    C, width, N = MODEL.hidden, MODEL.heads * MODEL.head_dim, BATCH * SEQUENCE
    shapes = [(C, 3 * width), (width, C), (C, 2 * MODEL.ffn), (MODEL.ffn, C)] * MODEL.layers + [(C, vocab)]
    linear = [(torch.randn(N, i), torch.randn(o, i), torch.randn(N, o)) for i, o in shapes]
    q = torch.randn(BATCH * MODEL.heads, SEQUENCE, MODEL.head_dim)
    p = torch.randn(BATCH * MODEL.heads, SEQUENCE, SEQUENCE)

    def matmuls() -> float:
        for x, weight, dout in linear:
            x @ weight.t(), dout @ weight, dout.t() @ x
        for _ in range(MODEL.layers):
            for _ in range(2):  # scores and values; their gradients
                q @ q.transpose(1, 2), p @ q, p.transpose(1, 2) @ q
        return float("nan")

    return matmuls


STEPS: dict[str, Callable[[int], Step]] = {
    "fasttrain": fasttrain,
    "fasttrain, selective": fasttrain_selective,
    "fasttrain, opaque ops": fasttrain_opaque,
    "plain, compiled": plain,
    "plain, eager": functools.partial(plain, compiled=False),
    "Transformers": transformers,
    "floor": floor,
}


def decoder(vocab: int) -> Decoder:
    model = Decoder(MODEL, vocab=vocab, sequence=SEQUENCE)
    model.init_weights(0)
    return model


def batch(vocab: int) -> tuple[Tensor, Tensor]:  # inputs, targets: (BATCH, SEQUENCE)
    tokens = torch.randint(vocab, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ordinary_loop(model: nn.Module, forward: Callable[[], Tensor]) -> Step:
    """A training loop with torch's own AdamW and clipping, and their usual arguments."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps)

    def step() -> float:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip)
        optimizer.step()
        return loss.item()

    return step


class PlainAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        C, width = MODEL.hidden, MODEL.heads * MODEL.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, width, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = (nn.RMSNorm(MODEL.head_dim, eps=MODEL.norm_eps) for _ in range(2))
        self.o_proj = nn.Linear(width, C, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (MODEL.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        q, k = (x * cos + torch.cat((-x[..., MODEL.head_dim // 2 :], x[..., : MODEL.head_dim // 2]), -1) * sin
                for x in (q, k))  # fmt: skip
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class PlainMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(MODEL.hidden, MODEL.ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(MODEL.ffn, MODEL.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(MODEL.hidden, eps=MODEL.norm_eps)
        self.self_attn = PlainAttention()
        self.post_attention_layernorm = nn.RMSNorm(MODEL.hidden, eps=MODEL.norm_eps)
        self.mlp = PlainMLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Plain(nn.Module):
    """The same model, with Transformers' names."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, MODEL.hidden)
        self.model.layers = nn.ModuleList(PlainLayer() for _ in range(MODEL.layers))
        self.model.norm = nn.RMSNorm(MODEL.hidden, eps=MODEL.norm_eps)
        cos, sin = rotary_table(SEQUENCE, MODEL.head_dim, theta=MODEL.rope_theta)
        self.register_buffer("cos", torch.cat((cos, cos), -1), persistent=False)
        self.register_buffer("sin", torch.cat((sin, sin), -1), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
