"""What a run is: frozen dataclasses, one section for each consumer, read from a recipe, a TOML file and the command line.

Later sources override earlier ones, key by key:

    python -m fasttrain.train --recipe tiny --config run.toml --optim.lr 3e-4

One parser (tyro) reads all three: the lines of a TOML file become arguments. So an unknown key or a wrong type is the same
error everywhere, names the nearest valid key, and comes before anything else happens.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Model:
    """The decoder: Qwen3's, or Llama's without qk_norm."""

    layers: int = 6
    """Number of blocks."""
    hidden: int = 384
    """Width of the residual stream."""
    heads: int = 6
    """Query heads."""
    kv_heads: int = 6
    """Key and value heads; fewer than heads is grouped-query attention."""
    head_dim: int = 64
    """Width of a head."""
    ffn: int = 1024
    """Width of the feed-forward layer."""
    vocab: int | None = None
    """Rows of the embedding; None: the tokenizer's, rounded up to a multiple of 64."""
    qk_norm: bool = True
    """Norm queries and keys per head, before the rotation."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-6
    """Added to the mean square in every norm."""
    tied_head: bool = True
    """The output head is the embedding."""
    dropout: float = 0.0
    """Of what each block adds to the residual stream."""
    attention_dropout: float = 0.0
    """Of attention weights; needs data.document_mask off."""
    init_std: float = 0.02
    """Standard deviation of the truncated-normal initial weights; projections into the stream get it / sqrt(2 * layers)."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which tokens, in which order."""

    path: Path | None = None
    """A prepared dataset; None: Python's own standard library, prepared on first use."""
    sequence: int = 256
    """Tokens of a sample."""
    document_mask: bool = True
    """Attention and positions stay within a document; off: a sample is one text."""
    seed: int = 0
    """Of the order of samples."""
    prefetch: int = 4
    """Batches read ahead in the background."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How many tokens a step sees, and in what pieces."""

    steps: int = 300
    """Length of the run."""
    sequences: int = 16
    """Sequences of a step, over all ranks."""
    micro: int = 8
    """Sequences of a rank's forward pass; the rest of its share is accumulated."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices of blocks, AdamW for everything else."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averages of gradient and squared gradient."""
    eps: float = 1e-8
    """AdamW's guard against division by zero."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases have none."""
    clip: float = 1.0
    """Greatest gradient norm; 0: no clipping."""
    muon_lr: float = 0.02
    """Peak learning rate of matrices under Muon."""
    muon_momentum: float = 0.95
    """Muon's momentum."""
    z_loss: float = 0.0
    """Weight of the squared log-partition function in the loss."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up; wsd: constant, then linear over the last decay_fraction of the run."""
    warmup: int = 20
    """Steps of linear warm-up."""
    final: float = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """Share of the run over which wsd decays."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Where and how the model runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of matmuls and activations; weights stay fp32. auto: bf16 on GPUs, fp32 on CPUs. fp16 scales its loss."""
    replicas: int = 1
    """Groups of ranks that each hold all the weights; more than 1 is HSDP. The other ranks share a group's weights."""
    reshard: bool = True
    """Free a block's gathered weights after its forward; off: hold them until its backward (ZeRO-2)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile each block; auto: where a compiler is installed and the run is long enough to pay for it."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in backward; selective: all but matmuls and attention."""
    timeout: int = 600
    """Seconds that a rank waits for the others."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When to save, and what to keep."""

    every: int = 100
    """Steps between checkpoints; the last step always saves. 0: only the last."""
    keep_last: int = 3
    """Newest checkpoints to keep."""
    keep_best: bool = True
    """Keep the one with the lowest validation loss too."""
    keep_every: int = 0
    """Keep each checkpoint whose step is a multiple of this too; 0: none."""
    background: bool = True
    """Write while training goes on."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Loss on data that is not trained on."""

    every: int = 100
    """Steps between validations; the last step always validates. 0: only the last."""
    sequences: int = 64
    """Sequences of each set, over all ranks."""
    sets: dict[str, Path] = field(default_factory=dict)
    """More sets by name, beside the held-out documents of data.path ("held-out")."""
    sample: str = "def "
    """The model continues this text at the end of the run; empty: no sample."""
    sample_tokens: int = 64
    """Length of the continuation."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """Where a run leaves its traces."""

    every: int = 1
    """Steps between lines in a log; a terminal shows every step."""
    tensorboard: bool = True
    """Write TensorBoard events (needs the tensorboard extra)."""
    wandb: str = ""
    """A Weights & Biases project to log to (needs the wandb extra); empty: none."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run."""

    run: Path = Path("runs/tiny")
    """Directory of the run: metrics, checkpoints, effective configuration."""
    seed: int = 0
    """Of initial weights and dropout."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    optim: Optim = field(default_factory=Optim)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    log: Log = field(default_factory=Log)
