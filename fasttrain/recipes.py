"""Runs that are known to make sense, as functions: `--recipe NAME`. The first one is the default.

A recipe is a whole Config. Its name states the size of its model, and a test holds it to that.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fasttrain.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ValidationConfig,
)

RECIPES: dict[str, Callable[[], Config]] = {}


def recipe(name: str) -> Callable[[Callable[[], Config]], Callable[[], Config]]:
    """Register a recipe; its runs get a directory of that name."""

    def register(function: Callable[[], Config]) -> Callable[[], Config]:
        RECIPES[name] = lambda: replace(function(), out=Path("runs") / name)
        return function

    return register


@recipe("tiny")
def tiny() -> Config:
    """Python's standard library on a laptop's CPU, in about two minutes."""
    return Config(
        model=ModelConfig(layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384),
        batch=BatchConfig(steps=1_000, sequences=8, micro=8),
        optim=OptimConfig(kind="muon", lr=6e-3, warmup=40),  # docs/log.md has the search
        validation=ValidationConfig(every=250, sequences=32),
    )


@recipe("pico-tiny")
def pico_tiny() -> Config:
    """A tiny decoder with every stabiliser on: dropout, decay, clipping, QK-norm, cosine to a tenth."""
    return Config(
        model=ModelConfig(layers=12, hidden=96, heads=12, kv_heads=4, head_dim=8, ffn=384, vocab=50_304, dropout=0.1),
        data=DataConfig(sequence=2048),
        batch=BatchConfig(steps=20_000, sequences=16, micro=4),
        optim=OptimConfig(lr=3e-4, warmup=2_000),
    )


def _large(
    model: ModelConfig, *, steps: int, lr: float, sequences: int, sequence: int, micro: int, z_loss: float = 0.0
) -> Config:
    """What the runs on GPUs have in common: cosine to a tenth, 2,000 steps of warm-up, rare checkpoints."""
    return Config(
        model=model,
        data=DataConfig(sequence=sequence),
        batch=BatchConfig(steps=steps, sequences=sequences, micro=micro),
        optim=OptimConfig(lr=lr, warmup=2_000, z_loss=z_loss),
        checkpoint=CheckpointConfig(every=1_000),
        validation=ValidationConfig(every=1_000, sequences=512),
    )


@recipe("300m")
def gpt_300m() -> Config:
    """300M parameters on four A100, 1M tokens a step; 12.8B tokens are 12,200 such steps."""
    model = ModelConfig(layers=20, hidden=1024, heads=16, kv_heads=16, ffn=2816, vocab=50_304)
    return _large(model, steps=12_200, lr=6e-4, sequences=512, sequence=2048, micro=16)


@recipe("124m")
def gpt_124m() -> Config:
    """GPT-2 small's size."""
    model = ModelConfig(layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048, vocab=50_304)
    return _large(model, steps=19_000, lr=6e-4, sequences=512, sequence=1024, micro=32)


@recipe("124m-continued")
def gpt_124m_continued() -> Config:
    """124m continued at a small constant rate with shorter sequences: pass --resume, and see what differs."""
    base = gpt_124m()
    return replace(
        base,
        data=replace(base.data, sequence=512),
        batch=BatchConfig(steps=21_000, sequences=1024, micro=64),
        optim=replace(base.optim, lr=1e-5, schedule="constant"),
    )


@recipe("550m")
def gpt_550m() -> Config:
    """550M parameters on one card of 32 GB: 64 sequences of 1,024 in micro-batches of 4."""
    model = ModelConfig(layers=24, hidden=1280, heads=20, kv_heads=20, ffn=3584, vocab=50_304)
    return _large(model, steps=170_000, lr=3e-4, sequences=64, sequence=1024, micro=4)


def _llama2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, lr: float, micro: int) -> Config:
    """Llama 2 on 2T tokens, 1M tokens a step."""
    model = ModelConfig(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=128, ffn=ffn,
        vocab=32_000, qk_norm=False, tied_head=False, norm_eps=1e-5,
    )  # fmt: skip
    return _large(model, steps=2_000_000, lr=lr, sequences=256, sequence=4096, micro=micro)


@recipe("llama2-7b")
def llama2_7b() -> Config:
    """HSDP: each node of eight GPUs holds the weights once, 128 GPUs in all; nothing is recomputed."""
    return replace(_llama2(32, 4096, 32, 32, 11_008, lr=3e-4, micro=2), parallel=ParallelConfig(dp_replicate=16))


@recipe("llama2-13b")
def llama2_13b() -> Config:
    """HSDP on 128 GPUs, with selective recomputation."""
    parallel = ParallelConfig(dp_replicate=16, recompute="selective")
    return replace(_llama2(40, 5120, 40, 40, 13_824, lr=3e-4, micro=1), parallel=parallel)


@recipe("llama2-70b")
def llama2_70b() -> Config:
    """FSDP over all GPUs, everything recomputed."""
    parallel = ParallelConfig(recompute="full")
    return replace(_llama2(80, 8192, 64, 8, 28_672, lr=1.5e-4, micro=1), parallel=parallel)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool, lr: float, micro: int) -> Config:
    model = ModelConfig(
        layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_dim=128, ffn=ffn,
        vocab=151_936, rope_theta=1e6, tied_head=tied,
    )  # fmt: skip
    return _large(model, steps=100_000, lr=lr, sequences=256, sequence=4096, micro=micro, z_loss=1e-5)


@recipe("qwen3-0.6b")
def qwen3_0_6b() -> Config:
    """Qwen3-0.6B's shape."""
    return _qwen3(28, 1024, 16, 3072, tied=True, lr=6e-4, micro=4)


@recipe("qwen3-1b")
def qwen3_1b() -> Config:
    """Between Qwen3-0.6B and 1.7B."""
    return _qwen3(28, 1536, 16, 4096, tied=True, lr=4e-4, micro=4)


@recipe("qwen3-8b")
def qwen3_8b() -> Config:
    """Qwen3-8B's shape."""
    parallel = ParallelConfig(recompute="selective")
    return replace(_qwen3(36, 4096, 32, 12_288, tied=False, lr=3e-4, micro=1), parallel=parallel)
