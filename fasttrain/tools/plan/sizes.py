"""The sizes that follow from the settings alone: parameters, tokens, epochs, checkpoints. And whether all that the user
says of the run can be true at once.

A contradiction is a sentence with the two values, and the setting that mends it. `fasttrain plan` and a run that starts
ask the same function. Of the data, if it is here, a plan asks how many tokens there are, and the vocabulary.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fasttrain import config
from fasttrain.flops import Parameters, flops_per_token, num_parameters, state_bytes
from fasttrain.fs import DISK_RESERVE, DISK_SLACK
from fasttrain.units import count, disk_size, parse_count, plural

# Hoffmann et al. 2022 (arXiv 2203.15556): about 20 tokens per parameter give the least loss for the compute
COMPUTE_OPTIMAL = 20
FITTED = 44e6  # parameters of the smallest model that this was fitted to; a toy may be what its user wants
# Muennighoff et al. 2023 (arXiv 2305.16264): up to about 4 epochs, repeated data is nearly as good as new
WORTHWHILE_EPOCHS = 4
# In a name, a size stands by itself: "llama2-7b", "550m", "0.6b"; "gpt2", "v2b", "ctx-4k" and "tiny-2" have none.
_STATED = re.compile(r"(?:^|[-_/ ])(\d+(?:\.\d+)?[mb])(?=$|[-_/ .])", re.IGNORECASE)
# A name rounds: 6.74B parameters are "7b". 249M are no "300m", and 160M no "550m".
NAME_TOLERANCE = 0.1
TOKENS_TOLERANCE = 0.02
DEFAULT_VOCAB = 4096  # of Python's standard library, the data of a run that names none


@dataclass(frozen=True, kw_only=True)
class Stated:
    """Statements of the user about a run, beside its settings."""

    size: tuple[str, float] | None = None  # as written, and as parameters
    size_from: str = ""
    size_is_a_name: bool = False  # it is only part of a name: then it is a warning
    tokens: float | None = None
    dataset: Mapping[str, float] | None = None  # tokens by component; a single dataset is named ""
    disk: float | None = None  # bytes of disk space for checkpoints
    disk_from: str = ""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The arithmetic of a run."""

    settings: config.Config
    vocab: int
    dp_size: int
    parameters: Parameters
    tokens_per_step: int
    tokens: int
    flops: int  # of the run
    micro_batches: int  # of a rank's step
    checkpoint_bytes: int
    checkpoints_held: int  # on the disk at once, at most
    epochs: Mapping[str, float] | None
    contradictions: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters.total

    @property
    def disk_bytes(self) -> int:
        """For the checkpoints that retention holds at most, the one being written included."""
        return int(self.checkpoints_held * self.checkpoint_bytes * DISK_SLACK) + DISK_RESERVE

    def lines(self) -> list[str]:
        """For people."""
        parameters, batch = self.parameters, self.settings.batch
        tied = "" if parameters.head else " (tied head)"
        times = self.tokens_per_parameter / COMPUTE_OPTIMAL
        meaning = ""
        if times < 0.5 and parameters.total >= FITTED:
            meaning = ": a smaller model would do better with this compute"
        elif times > 3:
            meaning = ", as for models that are used more than they are trained"
        lines = [
            f"{parameters.total:,} parameters ({count(parameters.total)}): {count(parameters.non_embedding)} "
            f"non-embedding + {count(parameters.embedding + parameters.head)} embedding{tied}",
            f"{self.tokens_per_step:,} tokens a step ({batch.sequences} x {self.settings.data.sequence}), "
            f"{count(self.tokens)} in {batch.steps:,} steps; micro-batch {batch.micro}, "
            f"{plural(self.micro_batches, 'accumulation step')}, {plural(self.dp_size, 'rank')}",
            f"{self.tokens_per_parameter:,.1f} tokens per parameter: {times:.2g} times the {COMPUTE_OPTIMAL} that are "
            f"compute-optimal{meaning}",
            f"{disk_size(self.checkpoint_bytes)} a checkpoint, at most {self.checkpoints_held} at a time: "
            f"{disk_size(self.disk_bytes)} of disk",
        ]
        if self.epochs is not None:
            seen = [f"{f'{name}: ' * bool(name)}{epochs:.3g}" for name, epochs in self.epochs.items()]
            lines.insert(2, f"epochs over the data: {', '.join(seen)}")
        return lines


def sizes(settings: config.Config, *, vocab: int, dp_size: int = 1, stated: Stated = Stated()) -> Sizes:  # noqa: B008
    """The arithmetic, and what contradicts what."""
    batch, T = settings.batch, settings.data.sequence
    tokens, dataset = batch.steps * batch.sequences * T, stated.dataset or {}
    weights = {name: settings.data.mixture[name].weight if name else 1.0 for name in dataset}
    epochs = {name: tokens * weights[name] / sum(weights.values()) / size for name, size in dataset.items()}
    run = Sizes(
        settings=settings,
        vocab=vocab,
        dp_size=dp_size,
        parameters=num_parameters(settings.model, vocab),
        tokens_per_step=batch.sequences * T,
        tokens=tokens,
        flops=tokens * flops_per_token(settings.model, vocab, T),
        micro_batches=max(batch.sequences // (batch.micro * dp_size), 1),
        checkpoint_bytes=state_bytes(settings.model, vocab, settings.optim.kind),
        checkpoints_held=settings.checkpoint.max_held(batch.steps),
        epochs=None if stated.dataset is None else epochs,
        contradictions=(),
        warnings=(),
    )
    size, ranks = _size(stated, run), (settings.parallel.indivisible(dp_size), batch.indivisible(dp_size))
    certain, likely = ("", size) if stated.size_is_a_name else (size, "")
    found = (certain, _tokens(stated, run), *ranks, _disk_space(stated, run), _components(run))
    warnings = filter(None, (likely, _repetition(run)))
    return replace(run, contradictions=tuple(filter(None, found)), warnings=tuple(warnings))


def at_start(settings: config.Config, *, vocab: int, dp_size: int, dataset: Mapping[str, float]) -> Sizes:
    """The sizes of a run that starts, and what contradicts its data or its name. Its disk, it looks at itself."""
    size, named = stated_size(settings.out.name), f"--out {settings.out}"
    stated = Stated(size=size, size_from=named, size_is_a_name=True, dataset=dataset)
    return sizes(settings, vocab=vocab, dp_size=dp_size, stated=stated)


def stated_size(name: str) -> tuple[str, float] | None:
    """The size in M or B that a name states, as written and as a number of parameters; None if it states none."""
    found = _STATED.search(name)
    return (found[1], parse_count(found[1])) if found else None


# What contradicts what, and what is dubious; empty: nothing


def _size(stated: Stated, run: Sizes) -> str:
    model, parameters = run.settings.model, run.parameters
    if stated.size is None or abs(parameters.total / stated.size[1] - 1) <= NAME_TOLERANCE:
        return ""
    twice, why, total = parameters.total + parameters.embedding, "", parameters.total
    if not parameters.head and abs(twice / stated.size[1] - 1) <= NAME_TOLERANCE:
        why = f" ({count(twice)} only if the tied head were counted a second time)"
    name = f"{total / 1e9:.2g}b" if total >= 1e9 else f"{total / 1e6:.3g}m"
    return (
        f"{stated.size_from} says {stated.size[0]}, but the model has {count(total)} parameters{why}; change "
        f"model.layers ({model.layers}), model.hidden ({model.hidden}) or model.ffn ({model.ffn}), or call it {name}"
    )


def _tokens(stated: Stated, run: Sizes) -> str:
    if stated.tokens is None or abs(run.tokens / stated.tokens - 1) <= TOKENS_TOLERANCE:
        return ""
    batch, steps = run.settings.batch, max(round(stated.tokens / run.tokens_per_step), 1)
    return (
        f"{count(stated.tokens)} tokens are stated, but {batch.steps:,} steps (batch.steps) of {batch.sequences} x "
        f"{run.settings.data.sequence} tokens are {count(run.tokens)}; set batch.steps to {steps}"
    )


def _disk_space(stated: Stated, run: Sizes) -> str:
    if stated.disk is None or run.disk_bytes <= stated.disk:
        return ""
    most = int((stated.disk - DISK_RESERVE) / (run.checkpoint_bytes * DISK_SLACK))
    remedy = "free some, or choose another --out"
    if most >= 3:
        remedy += f"; {most} fit: lower checkpoint.keep_last ({run.settings.checkpoint.keep_last}) or keep_every"
    return (
        f"the checkpoints of this run need {disk_size(run.disk_bytes)} ({run.checkpoints_held} of "
        f"{disk_size(run.checkpoint_bytes)}) and there are {disk_size(stated.disk)} in {stated.disk_from}; {remedy}"
    )


def _components(run: Sizes) -> str:
    """A mixture all of whose components are used up before the end."""
    mixture = run.settings.data.mixture
    if run.epochs is None or not mixture or not all(component.epochs for component in mixture.values()):
        return ""
    if any(run.epochs[name] < component.epochs for name, component in mixture.items() if name in run.epochs):
        return ""
    return (
        "every component of data.mixture reaches its epochs before the run ends; raise the epochs of one, or lower "
        f"batch.steps ({run.settings.batch.steps})"
    )


def _repetition(run: Sizes) -> str:
    most = max((run.epochs or {}).values(), default=0.0)
    if most <= WORTHWHILE_EPOCHS:
        return ""
    return (
        f"{most:.1f} epochs: beyond about {WORTHWHILE_EPOCHS}, repeated data teaches less and less; lower batch.steps, "
        "or add data"
    )


def is_here(data: config.DataConfig) -> bool:
    """Whether the data can be looked at. The default dataset is not built for this."""
    if data.mixture:
        return all(component.path.exists() for component in data.mixture.values())
    if data.path is not None:
        return data.path.exists()
    from fasttrain.data.corpus import standard_library_path

    return standard_library_path().exists()


def dataset_tokens(settings: config.Config) -> dict[str, float] | None:
    """Tokens to train on, by component; None: the data is not here, or not named yet."""
    data = settings.data
    # A vocabulary that is not that of the default dataset says that other data is meant
    unnamed = data.path is None and not data.mixture and settings.model.vocab not in (None, DEFAULT_VOCAB)
    if unnamed or not is_here(data):
        return None
    from fasttrain.data.datasets import training_data  # torch, which a plan does without otherwise

    return {name: float(len(dataset.split("train"))) for name, dataset in training_data(data).datasets.items()}


def vocab_of(settings: config.Config) -> int:
    """Rows of the embedding, as the trainer decides them."""
    if settings.model.vocab:
        return settings.model.vocab
    data = settings.data
    if data.path is None and not data.mixture:
        needed = DEFAULT_VOCAB
    elif is_here(data):
        from fasttrain.data.datasets import training_data

        needed = training_data(data).first.vocab
    elif data.vocab:
        needed = data.vocab
    else:
        raise ValueError(
            f"model.vocab is not set, and the data that would tell it is not here ({data.path or 'data.mixture'}); set "
            "model.vocab"
        )
    return -(-needed // 64) * 64
