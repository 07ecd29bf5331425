"""What a run is: frozen dataclasses, one section for each consumer, from a recipe, TOML files and the command line.

Later sources override earlier ones, key by key:

    python -m fasttrain.train --recipe tiny --config run.toml --optim.lr 3e-4

One parser (tyro) reads all of them: the lines of a TOML file become arguments. So an unknown key or a wrong type is the
same error everywhere, names the nearest valid key, and comes before anything else happens.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w
import tyro

from fasttrain.hf.config import TAKEN, architecture

STORED = "config.toml"  # the effective configuration, in a run's directory


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


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
    """Of the truncated-normal initial weights; projections into the residual stream get 1 / sqrt(2 * layers) of it."""

    def __post_init__(self) -> None:
        _require(
            self.heads % self.kv_heads == 0,
            f"model.heads ({self.heads}) must be a multiple of model.kv_heads ({self.kv_heads})",
        )
        _require(self.head_dim % 2 == 0, f"model.head_dim ({self.head_dim}) must be even, for rotary pairs")
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"model.{name} ({value}) must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class Component:
    """A dataset of a mixture."""

    path: Path
    """As data.path."""
    weight: float = 1.0
    """Its share of the tokens is this over the sum of all weights."""
    epochs: float = 0.0
    """It is seen so often at most, and the others take its place from then on; 0: no limit."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which tokens, in which order."""

    path: Path | None = None
    """A prepared dataset, or one of nanoGPT, llm.c or Megatron; None: Python's own standard library, prepared on first
    use."""
    mixture: dict[str, Component] = field(default_factory=dict)
    """Several datasets by name, in place of path: data.mixture.NAME.path, .weight, .epochs."""
    tokenizer: Path | None = None
    """tokenizer.json of data that comes without one; None: no bits per byte, no sample of text."""
    vocab: int | None = None
    """Tokens of data that does not say; None: as the tokenizer or the format has it, or GPT-2's."""
    separator: int | None = None
    """The token between documents of data that does not say, -1: none; None: as the vocabulary has it."""
    sequence: int = 256
    """Tokens of a sample."""
    document_mask: bool = True
    """Attention and positions stay within a document; off: a sample is one text."""
    seed: int = 0
    """Of the order of samples."""
    prefetch: int = 4
    """Batches read ahead in the background."""
    lint: Literal["stop", "warn", "off"] = "stop"
    """Look at samples of the data before the first step; stop: errors end the run; warn: they are events of it."""

    def __post_init__(self) -> None:
        _require(
            self.path is None or not self.mixture,
            f"data.path ({self.path}) and data.mixture ({', '.join(self.mixture)}) exclude each other; add a component "
            "with that path to the mixture, or leave out one of them",
        )
        for name, component in self.mixture.items():
            weight, epochs = component.weight, component.epochs
            _require(0 < weight < math.inf, f"data.mixture.{name}.weight ({weight}) must be above 0")
            _require(0 <= epochs < math.inf, f"data.mixture.{name}.epochs ({epochs}) must be 0, for no limit, or above")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How many tokens a step sees, and in what pieces."""

    steps: int = 300
    """Length of the run."""
    sequences: int = 16
    """Sequences of a step, over all ranks."""
    micro: int = 8
    """Sequences of a rank's forward pass; the rest of its share is accumulated."""

    def __post_init__(self) -> None:
        _require(self.steps > 0, f"batch.steps ({self.steps}) must be at least 1")
        _require(
            self.sequences % self.micro == 0,
            f"batch.sequences ({self.sequences}) must be a multiple of batch.micro ({self.micro})",
        )


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
    """Of matrices, the embedding included, times the learning rate; norms and biases have none."""
    clip: float = 1.0
    """Greatest gradient norm; 0: no clipping."""
    muon_lr: float = 0.02
    """Peak learning rate of matrices under Muon."""
    muon_momentum: float = 0.95
    """Muon's momentum."""
    muon_adjust: Literal["original", "match_rms_adamw"] = "original"
    """How muon_lr is scaled by a matrix's shape; match_rms_adamw wants a rate as small as AdamW's."""
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
    """Free a block's gathered weights after each use; off: hold them until the last backward of a step (ZeRO-2)."""
    reduce: Literal["last", "every"] = "last"
    """When accumulated gradients are reduced within a group: after the last micro-batch, which needs memory for whole
    gradients, or after every one. Between replicas it is always the last."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile each block; auto: where a compiler is installed and the run is long enough to pay for it."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in backward; selective: all but matmuls and attention."""
    timeout: int = 600
    """Seconds within which all ranks have ended when one of them died or hangs."""


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
    retries: int = 5
    """Times that a failed save is tried again, every few steps, before the run does what unsaved says."""
    unsaved: Literal["pause", "stop"] = "pause"
    """When saves keep failing; pause: hold the run, and try again until one succeeds; stop: end it."""

    def __post_init__(self) -> None:
        _require(self.retries >= 0, f"checkpoint.retries ({self.retries}) must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Loss on data that is not trained on."""

    every: int = 100
    """Steps between validations; the last step always validates. 0: only the last."""
    sequences: int = 64
    """Sequences of each set, over all ranks."""
    sets: dict[str, Path] = field(default_factory=dict)
    """More sets by name, beside the held-out documents of data.path ("held-out")."""
    patience: int = 0
    """Stop after so many validations in a row without a lower loss on the held-out documents; 0: never."""
    sample: str = "def "
    """The model continues this text at each validation; empty: no sample."""
    sample_tokens: int = 64
    """Length of the continuation."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What a run looks out for, and what it does then."""

    spike: Literal["warn", "skip", "rollback", "stop"] = "rollback"
    """When the loss spikes, or is not finite three times in a row; skip: go on past as many batches; rollback: to the
    last good checkpoint, and past the batches since; stop: end the run."""
    rollbacks: int = 3
    """Rollbacks before the run stops instead."""
    first: int = 96
    """Steps at the start of a run in which nothing but a value that is not finite counts as a spike."""
    slowdown: float = 0.2
    """Lasting slow-down of steps to report, as a share; 0: none."""
    envelope: tuple[tuple[float, float, float], ...] = ()
    """Losses to expect: rows of tokens, lowest, highest. An alarm when the loss is outside for 20 steps in a row."""

    def __post_init__(self) -> None:
        for name, least in (("rollbacks", 0), ("first", 64), ("slowdown", 0.0)):
            value = getattr(self, name)
            _require(value >= least, f"watch.{name} ({value}) must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Log:
    """Where a run leaves its traces."""

    every: int = 1
    """Steps between lines in a log; a terminal shows every step."""
    tensorboard: bool = True
    """Write TensorBoard events (needs the tensorboard extra)."""
    report: bool = True
    """Keep a page about the run, report.html in its directory, up to date with every checkpoint."""
    wandb: str = ""
    """A Weights & Biases project to log to (needs the wandb extra); empty: none."""
    profile: int = 0
    """Steps to profile, from the sixth of this process on: what the time and the memory go to, in profile/ of the run's
    directory; 0: none. --profile alone is --log.profile 3."""

    def __post_init__(self) -> None:
        _require(self.every > 0, f"log.every ({self.every}) must be at least 1")
        _require(self.profile >= 0, f"log.profile ({self.profile}) must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run."""

    out: Path = Path("runs/tiny")
    """Directory of the run: metrics, checkpoints, effective configuration."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint in the run's directory, or start; never: start, in a new directory; or
    what to start from: RUN, RUN@STEP or a checkpoint's directory."""
    from_hf: Path | None = None
    """A Hugging Face checkpoint (Qwen3 or Llama) to take the section model and the initial weights from; a run that has
    a checkpoint goes on from that. None: random weights."""
    seed: int = 0
    """Of initial weights and dropout."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    optim: Optim = field(default_factory=Optim)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    watch: Watch = field(default_factory=Watch)
    log: Log = field(default_factory=Log)

    def __post_init__(self) -> None:
        _require(
            not (self.model.attention_dropout and self.data.document_mask),
            f"model.attention_dropout ({self.model.attention_dropout}) needs data.document_mask False: attention over "
            "packed documents has no dropout",
        )
        _require(
            self.optim.warmup < self.batch.steps,
            f"optim.warmup ({self.optim.warmup}) must be shorter than the run: batch.steps is {self.batch.steps}",
        )
        _require(
            self.from_hf is None or self.resume in ("auto", "never"),
            f"from_hf ({self.from_hf}) and resume ({self.resume}) both say where the weights come from; leave out one",
        )


def load(argv: Sequence[str], recipes: Mapping[str, Callable[[], Config]], prog: str = "fasttrain.train") -> Config:
    """The configuration that a command line asks for. A mistake in it ends the program with exit code 2."""
    sources = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    sources.add_argument("--recipe", default=next(iter(recipes)))
    sources.add_argument("--config", action="append", default=[], type=Path)
    sources.add_argument("--profile", action="store_true")
    chosen, arguments = sources.parse_known_args(argv)
    if chosen.profile:
        arguments = ["--log.profile", "3", *arguments]
    if chosen.recipe not in recipes:
        sources.error(f"there is no recipe {chosen.recipe!r}; there are {', '.join(recipes)}")
    for path in reversed(chosen.config):
        arguments = [*_arguments(_read(path, sources.error)), *arguments]
    description = (
        f"Sources of the settings, later ones override earlier ones: --recipe NAME ({', '.join(recipes)}), "
        "--config FILE.toml (repeatable), and the options below. --profile is --log.profile 3. "
        "Several datasets, in place of --data.path: "
        "--data.mixture.NAME.path, --data.mixture.NAME.weight and --data.mixture.NAME.epochs, for any NAME."
    )
    try:
        default = recipes[chosen.recipe]()
        found = _found(arguments, default)
        default = dataclasses.replace(default, model=dataclasses.replace(default.model, **found))
        with _keys_of_sections(arguments):
            settings = tyro.cli(
                Config,
                args=arguments,
                default=_with_components(default, arguments),
                prog=prog,
                description=description,
                use_underscores=True,
                config=(tyro.conf.FlagConversionOff,),
            )
        _check_found(settings, found)
        return settings
    except (ValueError, FileNotFoundError) as error:
        sources.error(str(error))


def _found(arguments: Sequence[str], default: Config) -> Mapping[str, Any]:
    """What the checkpoint that --from_hf names says of the model, in place of what the recipe says.

    A run that has begun knows it too, and goes on without the checkpoint.
    """
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--from_hf", "--from-hf", default=default.from_hf, nargs="?")
    named.add_argument("--out", default=default.out, nargs="?")
    words = named.parse_known_args(arguments)[0]
    if words.from_hf in (None, "None"):  # or without a value, of which tyro will tell
        return {}
    try:
        return architecture(Path(words.from_hf))
    except FileNotFoundError:
        stored = Path(words.out or default.out) / STORED
        before = tomllib.loads(stored.read_text()) if stored.exists() else {}
        if before.get("from_hf") != str(Path(words.from_hf)):
            raise
        return {name: before["model"][name] for name in TAKEN}


def _check_found(settings: Config, found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        stated = getattr(settings.model, name)
        _require(
            stated == value,
            f"model.{name} is set to {stated}, and {settings.from_hf} has {value}; leave it out: --from-hf brings the "
            "model with it",
        )


def _with_components(default: Config, arguments: Sequence[str]) -> Config:
    """With a place for every component of data.mixture that arguments name: the parser wants to know them."""
    prefix = "--data.mixture."
    names = [argument.removeprefix(prefix).split(".")[0] for argument in arguments if argument.startswith(prefix)]
    added = {name: Component(path=tyro.MISSING) for name in names if name not in default.data.mixture}
    mixture = default.data.mixture | added
    return dataclasses.replace(default, data=dataclasses.replace(default.data, mixture=mixture))


@contextmanager
def _keys_of_sections(arguments: Sequence[str]) -> Iterator[None]:
    """Under an error about an unknown key: what its section has. tyro knows similar spellings, not similar meanings."""
    try:
        yield
    except SystemExit as exit:
        if exit.code:
            for hint in filter(None, map(_hint, arguments)):
                print(hint, file=sys.stderr)
        raise


def _hint(argument: str) -> str:
    """What may be meant by an argument that no setting has; empty: nothing is wrong with it, or nobody knows."""
    values = {f.name: getattr(Config(), f.name) for f in dataclasses.fields(Config)}
    sections = {name: list(vars(value)) for name, value in values.items() if dataclasses.is_dataclass(value)}
    section, _, key = argument.removeprefix("--").partition(".")
    key = key.split(".")[0]
    if not argument.startswith("--") or not key or key in sections.get(section, []):
        return ""
    if section in sections:
        return f"{argument} is unknown; {section} has {', '.join(sections[section])}"
    others = [f"--{other}.{key}" for other, keys in sections.items() if key in keys]
    meant = f"did you mean {' or '.join(others)}?" if others else f"sections are {', '.join(sections)}"
    return f"{argument} is unknown: there is no section {section}; {meant}"


def _read(path: Path, fail: Callable[[str], Any]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        fail(f"--config {path}: {error.strerror}")
    except tomllib.TOMLDecodeError as error:
        fail(f"--config {path}: {error}")
    raise AssertionError("unreachable")


def _arguments(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A TOML table as the arguments that say the same."""
    for key, value in table.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" != "validation.sets":
            yield from _arguments(value, f"{prefix}{key}.")
        else:
            yield f"--{prefix}{key}"
            yield from map(str, _flat(value))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def to_toml(config: Config) -> str:
    """The effective configuration, in the form that --config reads."""
    return tomli_w.dumps(_plain(dataclasses.asdict(config)))


def from_toml(text: str) -> Config:
    """What to_toml has written, of a run that exists: nothing is looked up."""
    arguments = list(_arguments(tomllib.loads(text)))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return tyro.cli(
                Config,
                args=arguments,
                default=_with_components(Config(), arguments),
                use_underscores=True,
                config=(tyro.conf.FlagConversionOff,),
            )
        except SystemExit:
            pass
    keys = ", ".join(word for word in arguments if word.startswith("--") and word in said.getvalue())
    raise ValueError(
        f"the settings of the run are not of this version of fasttrain ({keys}); use the one that wrote them"
    )


def summary(config: Config) -> list[str]:
    """The effective configuration, a line for each section."""
    table = _plain(dataclasses.asdict(config))
    sections = {"run": {key: value for key, value in table.items() if not isinstance(value, Mapping)}}
    sections |= {key: value for key, value in table.items() if isinstance(value, Mapping)}
    layout: dict[str, Any] = {
        "width": 100,
        "subsequent_indent": " " * 11,
        "break_long_words": False,
        "break_on_hyphens": False,
    }
    return [
        textwrap.fill(f"{name:<11}" + " ".join(f"{key}={value}" for key, value in _dotted(items)), **layout)
        for name, items in sections.items()
    ]


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, Path):
        return str(value)  # "None": TOML has no null
    return value
