"""The configuration of a run: frozen dataclasses, one section for each consumer. fasttrain.cli.parse reads them."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from fasttrain.bounds import Bounded, Bounds
from fasttrain.optimizers import OptimizerKind
from fasttrain.units import plural

# Ends that no run comes near, and at which arithmetic and plans still work
STEPS, BATCH = Bounds(0, 10**9), Bounds(1, 10**6)
WIDTH, VOCAB = Bounds(1, 10**6), Bounds(1, 10**8)
RATE, SHARE = Bounds(0, 1000, without=0), Bounds(0, 1, without=1)
SEED = Bounds(0, 2**63 - 1)  # a file of TOML has no greater number


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Bounded):
    """The decoder: Qwen3's, or Llama's without qk_norm."""

    layers: Annotated[int, Bounds(1, 1000)] = 6
    """Number of blocks."""
    hidden: Annotated[int, WIDTH] = 384
    """Width of the residual stream."""
    heads: Annotated[int, WIDTH] = 6
    """Query heads."""
    kv_heads: Annotated[int, WIDTH] = 6
    """Key and value heads; fewer than heads is grouped-query attention."""
    head_dim: Annotated[int, Bounds(2, 10_000)] = 64
    """Width of a head."""
    ffn: Annotated[int, Bounds(1, 10**7)] = 1024
    """Width of the feed-forward layer."""
    vocab: Annotated[int | None, VOCAB] = None
    """Rows of the embedding; None: the tokenizer's, rounded up to a multiple of 64."""
    qk_norm: bool = True
    """Norm queries and keys per head."""
    rope_theta: Annotated[float, Bounds(1, 10**12)] = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: Annotated[float, Bounds(1e-20, 1)] = 1e-6
    """Added to the mean square in every norm."""
    tied_head: bool = True
    """The output head is the embedding."""
    dropout: Annotated[float, SHARE] = 0.0
    """Of what each block adds to the residual stream."""
    attention_dropout: Annotated[float, SHARE] = 0.0
    """Of attention weights; needs data.document_mask off."""
    attention_backend: Literal["auto", "fa4", "fa3", "fa2", "varlen", "cudnn", "sdpa", "triton", "cpp", "blocked"] = (
        "auto"
    )
    """Kernels of attention."""
    deterministic: bool = True
    """Attention's gradients repeat bit for bit."""
    init_std: Annotated[float, Bounds(0, 10, without=0)] = 0.02
    """Of the truncated-normal initial weights; projections into the residual stream get 1 / sqrt(2 * layers) of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.heads % self.kv_heads == 0,
            f"model.heads ({self.heads}) must be a multiple of model.kv_heads ({self.kv_heads})",
        )
        _require(self.head_dim % 2 == 0, f"model.head_dim ({self.head_dim}) must be even, for rotary pairs")


@dataclass(frozen=True, kw_only=True)
class ComponentConfig(Bounded):
    """A dataset of a mixture."""

    path: Path
    """As data.path."""
    weight: Annotated[float, Bounds(1e-9, 10**15)] = 1.0
    """Its share of the tokens is this over the sum of all weights."""
    epochs: Annotated[float, Bounds(0, 10**6)] = 0.0
    """It is seen so often at most, and the others take its place from then on; 0: no limit."""

    def __post_init__(self) -> None:
        """DataConfig checks its bounds, and knows its name."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Bounded):
    """Which tokens, in which order."""

    path: Path | None = None
    """A prepared dataset, or one of nanoGPT, llm.c or Megatron; None: Python's own standard library, prepared on first
    use."""
    mixture: dict[str, ComponentConfig] = field(default_factory=dict)
    """Several datasets by name, in place of path: data.mixture.NAME.path, .weight, .epochs."""
    tokenizer: Path | None = None
    """tokenizer.json of data that comes without one; None: no bits per byte, no sample of text."""
    vocab: Annotated[int | None, VOCAB] = None
    """Tokens of data that does not say; None: as the tokenizer or the format has it, or GPT-2's."""
    separator: Annotated[int | None, Bounds(-1, 10**8)] = None
    """The token between documents of data that does not say, -1: none; None: as the vocabulary has it."""
    sequence: Annotated[int, Bounds(2, 10**7)] = 256
    """Tokens of a sample."""
    document_mask: bool = True
    """Attention and positions stay within a document; off: a sample is one text."""
    seed: Annotated[int, SEED] = 0
    """Of the order of samples."""
    prefetch: Annotated[int, Bounds(0, 10_000)] = 4
    """Batches read ahead in the background."""
    lint: Literal["stop", "warn", "off"] = "stop"
    """Look at samples of the data before the first step; stop: errors end the run; warn: they are events of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.path is None or not self.mixture,
            f"data.path ({self.path}) and data.mixture ({', '.join(self.mixture)}) exclude each other; add a component "
            "with that path to the mixture, or remove one of them",
        )
        for name, component in self.mixture.items():
            component.check_bounds(f"data.mixture.{name}")


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Bounded):
    """How many tokens a step sees, and in what micro-batches."""

    steps: Annotated[int, Bounds(1, 10**9)] = 300
    """Length of the run."""
    sequences: Annotated[int, BATCH] = 16
    """Sequences of a step, over all ranks."""
    micro: Annotated[int, BATCH] = 8
    """Sequences of a rank's forward pass; the rest of its share is accumulated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(not self.indivisible(1), self.indivisible(1))

    def indivisible(self, dp_size: int) -> str:
        """Why so many ranks cannot share a step, with the settings that mend it; empty: they can."""
        together = dp_size * self.micro
        if self.sequences % together == 0:
            return ""
        micro = next((m for m in range(self.micro, 0, -1) if self.sequences % (dp_size * m) == 0), 0)
        smaller = f", or batch.micro to {micro}" if micro else ""
        ranks = f"{together}, {plural(dp_size, 'rank')} times " if dp_size > 1 else ""
        return (
            f"batch.sequences ({self.sequences}) must be a multiple of {ranks}batch.micro ({self.micro}); "
            f"set batch.sequences to {-(-self.sequences // together) * together}{smaller}"
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Bounded):
    """The optimizer and its learning rate."""

    kind: OptimizerKind = "adamw"
    """muon: for the matrices of blocks, AdamW for everything else."""
    lr: Annotated[float, RATE] = 1e-3
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], SHARE] = (0.9, 0.95)
    """AdamW's decay rates of the moments."""
    eps: Annotated[float, Bounds(1e-30, 1)] = 1e-8
    """AdamW's guard against division by zero."""
    weight_decay: Annotated[float, Bounds(0, 100)] = 0.1
    """Of matrices, the embedding included, times the learning rate; norms and biases have none."""
    clip: Annotated[float, Bounds(0, 10**9)] = 1.0
    """Greatest gradient norm; 0: no clipping."""
    muon_lr: Annotated[float, RATE] = 0.02
    """Peak learning rate of matrices under Muon."""
    muon_momentum: Annotated[float, SHARE] = 0.95
    """Muon's momentum."""
    muon_adjust: Literal["original", "match_rms_adamw"] = "original"
    """How muon_lr is scaled by a matrix's shape; match_rms_adamw wants a rate as small as AdamW's."""
    z_loss: Annotated[float, Bounds(0, 100)] = 0.0
    """Weight of the squared log-partition function in the loss."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up; wsd: constant, then linear over the last decay_fraction of the run."""
    warmup: Annotated[int, STEPS] = 20
    """Steps of linear warm-up."""
    final: Annotated[float, Bounds(0, 1)] = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    decay_fraction: Annotated[float, Bounds(0, 1, without=0)] = 0.2
    """Share of the run over which wsd decays."""


SMALL = 7 * 10**8  # parameters of a model whose weights, gradients and moments, 18 bytes of each, fit on any GPU
_UNIT = 2**26  # bytes of weights that are worth a collective, and the host's work around it


def unit_blocks(layers: int, block: float, device: str) -> int:
    """Blocks, of so many bytes of weights, in a unit: what is compiled, gathered and reduced together."""
    units = -(-layers // max(int(_UNIT // block), 1))
    return -(-layers // units) if device == "cuda" else 1


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Bounded):
    """Where and how the model runs."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda where there is one; mps: untested."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of matmuls and activations; weights stay fp32. auto: bf16 on GPUs, fp32 on CPUs. fp16 scales its loss."""
    dp_replicate: Annotated[int, Bounds(0, 10**6)] = 0
    """Groups of ranks that each hold all the weights, and whose ranks share them; as many as ranks is plain data
    parallelism, fewer but more than 1 HSDP. 0: as many as GPUs for models of up to 700M parameters, else 1."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after each use; off: hold them until the last backward of a step (ZeRO-2). Ranks
    that do not share weights hold bf16 or fp16 ones also of models of up to 700M parameters."""
    grad_reduce: Literal["last", "every"] = "last"
    """When accumulated gradients are reduced within a group: after the last micro-batch, which needs memory for whole
    gradients, or after every one. Between groups it is always the last."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile each block; auto: where a compiler is installed and the run is long enough to pay for it."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in backward; selective: all but matmuls and attention."""
    cuda_graph: bool = False
    """Capture the step of one GPU and replay it: one launch a step; not with fp16."""
    timeout: Annotated[int, Bounds(1, 10**7)] = 600
    """Seconds within which all ranks have ended when one of them died or hangs."""

    def indivisible(self, ranks: int) -> str:
        """Why so many ranks cannot form dp_replicate groups, with the settings that mend it; empty: they can."""
        if ranks % (self.dp_replicate or 1) == 0:
            return ""
        smaller = next(n for n in range(min(self.dp_replicate, ranks), 0, -1) if ranks % n == 0)
        return (
            f"parallel.dp_replicate ({self.dp_replicate}) must divide the number of ranks, {ranks}; set it to "
            f"{smaller}, or start a multiple of {self.dp_replicate} ranks"
        )

    def replicate_groups(self, ranks: int, num_parameters: int, device: str) -> int:
        """Groups of ranks that each hold all the weights."""
        return self.dp_replicate or (ranks if device == "cuda" and num_parameters <= SMALL else 1)

    def shards(self, ranks: int, num_parameters: int, device: str, *, precision: str) -> bool:
        """Whether FSDP has the weights. Otherwise they are whole on each rank, with low-precision copies of all at
        once, cast in one launch a step. Of large models, FSDP casts one block after the other, on a single rank too."""
        holds_copies = self.cuda_graph or not self.reshard_after_forward or num_parameters <= SMALL
        shared = self.replicate_groups(ranks, num_parameters, device) != ranks
        return shared or not (holds_copies or precision == "fp32")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Bounded):
    """When to save, and what to keep."""

    every: Annotated[int, STEPS] = 100
    """Steps between checkpoints; the last step always saves. 0: only the last."""
    keep_last: Annotated[int, Bounds(1, 10**6)] = 3
    """Newest checkpoints to keep."""
    keep_best: bool = True
    """Keep the one with the lowest validation loss too."""
    keep_every: Annotated[int, STEPS] = 0
    """Keep each checkpoint whose step is a multiple of this too; 0: none."""
    background: bool = True
    """Write while training continues."""
    retries: Annotated[int, Bounds(0, 10**6)] = 5
    """Retries of a failed save, every few steps, before the run does what on_save_failure says."""
    on_save_failure: Literal["pause", "stop"] = "pause"
    """When saves keep failing; pause: wait, and retry until one succeeds; stop: end the run."""

    def max_held(self, steps: int) -> int:
        """Checkpoints of a run on the disk at once, at most: a new one is written before an old one goes."""
        every = self.every or steps
        saves = -(-steps // every)
        every_kept = steps // math.lcm(every, self.keep_every) if self.keep_every else 0
        return min(saves, self.keep_last + self.keep_best + every_kept + 1)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Bounded):
    """Loss on data that is not trained on."""

    every: Annotated[int, STEPS] = 100
    """Steps between validations; the last step always validates. 0: only the last."""
    sequences: Annotated[int, Bounds(1, 10**9)] = 64
    """Sequences of each set, over all ranks."""
    sets: dict[str, Path] = field(default_factory=dict)
    """More sets by name, besides the held-out documents of data.path ("held-out")."""
    patience: Annotated[int, Bounds(0, 10**6)] = 0
    """Stop after so many validations in a row without a lower loss on the held-out documents; 0: never."""
    sample: str = "def "
    """The model continues this text at each validation; empty: no sample."""
    sample_tokens: Annotated[int, Bounds(1, 10**5)] = 64
    """Length of the continuation."""


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(Bounded):
    """What is monitored, and what the run does then."""

    spike: Literal["warn", "skip", "rollback", "stop"] = "rollback"
    """When the loss spikes, or is not finite three times in a row; skip: skip as many batches; rollback: to the
    last good checkpoint, and past the batches since; stop: end the run."""
    rollbacks: Annotated[int, Bounds(0, 10**6)] = 3
    """Rollbacks before the run stops instead."""
    first: Annotated[int, Bounds(64, 10**9)] = 96
    """Steps at the start of a run in which nothing but a value that is not finite counts as a spike."""
    slowdown: Annotated[float, Bounds(0, 100)] = 0.2
    """Lasting slow-down of steps to report, as a share; 0: none."""
    envelope: Annotated[tuple[tuple[float, float, float], ...], Bounds(0, 10**18)] = ()
    """Losses to expect: rows of tokens, lowest, highest. An alarm when the loss is outside for 20 steps in a row."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(Bounded):
    """Where a run leaves its traces."""

    every: Annotated[int, Bounds(0, 10**9)] = 0
    """Steps between lines in a log; 0: a fortieth of the run, at most 10. A terminal shows all."""
    tensorboard: bool = True
    """Write TensorBoard events (needs the tensorboard extra)."""
    report: bool = True
    """Keep report.html up to date with every checkpoint."""
    wandb: str = ""
    """A Weights & Biases project to log to (needs the wandb extra); empty: none."""
    profile: Annotated[int, Bounds(0, 10_000)] = 0
    """Steps to profile, from the sixth of this process on: what the time and the memory go to, in profile/ of the run's
    directory; 0: none. --profile alone is --log.profile 3."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Bounded):
    """How `fasttrain generate` draws tokens. No section of Config: a run's own sample has the defaults."""

    temperature: Annotated[float, Bounds(0, 1000)] = 0.8
    """Above 1: more daring; 0: always the likeliest token."""
    top_k: Annotated[int, Bounds(0, 10**8)] = 40
    """Only so many tokens, the likeliest; 0: all."""
    top_p: Annotated[float, Bounds(0, 1, without=0)] = 1.0
    """Of these, only the likeliest that have so much of the probability together."""
    seed: Annotated[int, SEED] = 0
    """The same seed gives the same text."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Bounded):
    """What decides about the tokens of `fasttrain data prepare`, beside its inputs and tokenizer. No section either."""

    text_key: str = "text"
    validation: Annotated[float, SHARE] = 0.005
    shortest: Annotated[int, Bounds(1, 2**28)] = 16
    longest: Annotated[int, Bounds(2**10, 2**28)] = 2**22
    keep_duplicates: bool = False


@dataclass(frozen=True, kw_only=True)
class Config(Bounded):
    """A run."""

    out: Path = Path("runs/tiny")
    """Directory of the run: metrics, checkpoints, effective configuration."""
    resume: str = "auto"
    """auto: resume from the newest checkpoint in the run's directory, or start; never: start, in a new directory; or
    what to start from: RUN, RUN@STEP or a checkpoint's directory."""
    from_hf: Path | None = None
    """A Hugging Face checkpoint (Qwen3 or Llama) to take the section model and the initial weights from; a run that has
    a checkpoint resumes from that. None: random weights."""
    seed: Annotated[int, SEED] = 0
    """Of initial weights and dropout."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            not (self.model.attention_dropout and self.data.document_mask),
            f"model.attention_dropout ({self.model.attention_dropout}) needs data.document_mask False: attention over "
            "packed documents has no dropout",
        )
        warmup, steps, optim = self.optim.warmup, self.batch.steps, self.optim
        _require(
            warmup < steps,
            f"optim.warmup ({warmup}) must be shorter than the run: batch.steps is {steps}; set optim.warmup to "
            f"{steps // 10}, or batch.steps to more than {warmup}",
        )
        _require(
            optim.schedule != "wsd" or warmup + steps * optim.decay_fraction <= steps,
            f"optim.warmup ({warmup}) and the decay (optim.decay_fraction {optim.decay_fraction} of {steps} steps) are "
            "longer than the run together; lower one of them",
        )
        _require(
            self.from_hf is None or self.resume in ("auto", "never"),
            f"from_hf ({self.from_hf}) and resume ({self.resume}) both say where the weights come from; remove one",
        )
