"""What follows from the settings alone, without any model of speed: sizes, tokens, epochs, checkpoints. And whether
all that the user says of the run can be true at once.

A contradiction is a sentence with the two values, and the setting that mends it. `fasttrain plan` and a run that starts
ask the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fasttrain import config
from fasttrain.flops import Parameters, block_matrices, flops_per_token, num_parameters
from fasttrain.fs import DISK_RESERVE, DISK_SLACK
from fasttrain.tools.plan.quantities import count, gigabytes, stated_size

# Hoffmann et al. 2022 (arXiv 2203.15556): about 20 tokens per parameter give the least loss for the compute
COMPUTE_OPTIMAL = 20
# Muennighoff et al. 2023 (arXiv 2305.16264): up to about 4 epochs, repeated data is nearly as good as new
WORTHWHILE_EPOCHS = 4
# A name rounds: 6.74B parameters are "7b". 249M are no "300m", and 160M no "550m".
NAME_TOLERANCE = 0.1
TOKENS_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What the user says of a run beside its settings."""

    size: tuple[str, float] | None = None  # as written, and as parameters
    size_from: str = ""
    tokens: float | None = None
    dataset: Mapping[str, float] | None = None  # tokens by component; a single dataset is named ""
    room: float | None = None  # bytes for checkpoints
    room_from: str = ""


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
        head = "" if parameters.head else ", the head is the embedding"
        times = self.tokens_per_parameter / COMPUTE_OPTIMAL
        lines = [
            f"{parameters.total:,} parameters ({count(parameters.total)}): {count(parameters.non_embedding)} beside "
            f"{count(parameters.embedding + parameters.head)} of the vocabulary's tables{head}",
            f"{self.tokens_per_step:,} tokens a step ({batch.sequences} x {self.settings.data.sequence}), "
            f"{count(self.tokens)} in {batch.steps:,} steps; {self.micro_batches} micro-batch"
            f"{'es' * (self.micro_batches != 1)} of {batch.micro} on each of {self.dp_size} rank{'s' * (self.dp_size > 1)}",
            f"{self.tokens_per_parameter:,.1f} tokens per parameter: {times:.2g} times the {COMPUTE_OPTIMAL} that are "
            f"compute-optimal{_meaning(times)}",
            f"{gigabytes(self.checkpoint_bytes)} a checkpoint, at most {self.checkpoints_held} at a time: "
            f"{gigabytes(self.disk_bytes)} of disk",
        ]
        if self.epochs is not None:
            seen = [f"{f'{name}: ' * bool(name)}{epochs:.3g}" for name, epochs in self.epochs.items()]
            lines.insert(2, f"epochs over the data: {', '.join(seen)}")
        return lines


def sizes(settings: config.Config, *, vocab: int, dp_size: int = 1, stated: Stated = Stated()) -> Sizes:  # noqa: B008
    """The arithmetic, and what contradicts what."""
    batch, T = settings.batch, settings.data.sequence
    parameters = num_parameters(settings.model, vocab)
    tokens = batch.steps * batch.sequences * T
    epochs = _epochs(settings, tokens, stated.dataset) if stated.dataset is not None else None
    result = Sizes(
        settings=settings,
        vocab=vocab,
        dp_size=dp_size,
        parameters=parameters,
        tokens_per_step=batch.sequences * T,
        tokens=tokens,
        flops=tokens * flops_per_token(settings.model, vocab, T),
        micro_batches=max(batch.sequences // (batch.micro * dp_size), 1),
        checkpoint_bytes=state_bytes(settings, parameters),
        checkpoints_held=settings.checkpoint.max_held(batch.steps),
        epochs=epochs,
        contradictions=(),
        warnings=(),
    )
    contradictions = [
        *_size(stated, parameters, settings), *_tokens(stated, result), *_ranks(settings, dp_size),
        *_room(stated, result), *_components(result),
    ]  # fmt: skip
    warnings = [*_repetition(result)]
    return Sizes(**vars(result) | dict(contradictions=tuple(contradictions), warnings=tuple(warnings)))


def at_start(settings: config.Config, *, vocab: int, dp_size: int, dataset: Mapping[str, float]) -> Sizes:
    """What a run that starts says of itself: its arithmetic, and what in it contradicts its name or its data.

    Room for checkpoints is not asked for here: a run looks at its own disk, with what is on it already.
    """
    size = stated_size(settings.out.name)
    stated = Stated(size=size, size_from=f"--out {settings.out}", dataset=dataset)
    return sizes(settings, vocab=vocab, dp_size=dp_size, stated=stated)


def state_bytes(settings: config.Config, parameters: Parameters) -> int:
    """Of a checkpoint: weights and AdamW's two averages in fp32; Muon has one average of its matrices."""
    saved = settings.model.layers * block_matrices(settings.model) if settings.optim.kind == "muon" else 0
    return 12 * parameters.total - 4 * saved


def _size(stated: Stated, parameters: Parameters, settings: config.Config) -> list[str]:
    if stated.size is None:
        return []
    text, size = stated.size
    if abs(parameters.total / size - 1) <= NAME_TOLERANCE:
        return []
    twice = parameters.total + parameters.embedding
    why = ""
    if not parameters.head and abs(twice / size - 1) <= NAME_TOLERANCE:
        why = f" ({count(twice)} only if the tied head were counted a second time)"
    return [
        f"{stated.size_from} says {text}, but the model has {count(parameters.total)} parameters{why}; change "
        f"model.layers ({settings.model.layers}), model.hidden ({settings.model.hidden}) or model.ffn "
        f"({settings.model.ffn}), or call it {_name(parameters.total)}"
    ]


def _tokens(stated: Stated, run: Sizes) -> list[str]:
    if stated.tokens is None or abs(run.tokens / stated.tokens - 1) <= TOKENS_TOLERANCE:
        return []
    batch = run.settings.batch
    steps = max(round(stated.tokens / run.tokens_per_step), 1)
    return [
        f"{count(stated.tokens)} tokens are stated, but {batch.steps:,} steps (batch.steps) of {batch.sequences} x "
        f"{run.settings.data.sequence} tokens are {count(run.tokens)}; set batch.steps to {steps}"
    ]


def _ranks(settings: config.Config, dp_size: int) -> list[str]:
    batch, dp_replicate = settings.batch, settings.parallel.dp_replicate
    found = []
    if dp_size % dp_replicate:
        found.append(
            f"parallel.dp_replicate ({dp_replicate}) must divide the number of GPUs, {dp_size}; set it to "
            f"{_divisor(dp_size, dp_replicate)}"
        )
    together = dp_size * batch.micro
    if batch.sequences % together:
        more = -(-batch.sequences // together) * together
        micro = next((m for m in range(batch.micro, 0, -1) if batch.sequences % (dp_size * m) == 0), 0)
        smaller = f", or batch.micro to {micro}" if micro else ""
        found.append(
            f"batch.sequences ({batch.sequences}) must be a multiple of {together}: {dp_size} GPUs with micro-batches of "
            f"{batch.micro} (batch.micro); set batch.sequences to {more}{smaller}"
        )
    return found


def _room(stated: Stated, run: Sizes) -> list[str]:
    if stated.room is None or run.disk_bytes <= stated.room:
        return []
    most = int((stated.room - DISK_RESERVE) / (run.checkpoint_bytes * DISK_SLACK))
    remedy = "free some, or choose another --out"
    if most >= 3:
        remedy += f"; {most} fit: lower checkpoint.keep_last ({run.settings.checkpoint.keep_last}) or keep_every"
    return [
        f"the checkpoints of this run need {gigabytes(run.disk_bytes)} ({run.checkpoints_held} of "
        f"{gigabytes(run.checkpoint_bytes)}) and there are {gigabytes(stated.room)} in {stated.room_from}; {remedy}"
    ]


def _components(run: Sizes) -> list[str]:
    """A mixture all of whose components are used up before the end."""
    mixture = run.settings.data.mixture
    if run.epochs is None or not mixture or not all(component.epochs for component in mixture.values()):
        return []
    if all(run.epochs[name] >= component.epochs for name, component in mixture.items() if name in run.epochs):
        return [
            "every component of data.mixture reaches its epochs before the run ends; raise the epochs of one, or lower "
            f"batch.steps ({run.settings.batch.steps})"
        ]
    return []


def _repetition(run: Sizes) -> list[str]:
    most = max(run.epochs.values(), default=0.0) if run.epochs else 0.0
    if most <= WORTHWHILE_EPOCHS:
        return []
    return [
        f"{most:.1f} epochs: beyond about {WORTHWHILE_EPOCHS}, repeated data teaches less and less; lower batch.steps, "
        "or add data"
    ]


def _epochs(settings: config.Config, tokens: int, dataset: Mapping[str, float]) -> dict[str, float]:
    if "" in dataset:
        return {"": tokens / dataset[""]}
    weights = {name: settings.data.mixture[name].weight for name in dataset}
    return {name: tokens * weights[name] / sum(weights.values()) / size for name, size in dataset.items()}


def _meaning(times: float) -> str:
    if times < 0.5:
        return ": a smaller model would do better with this compute"
    if times > 3:
        return ", as for models that are used more than they are trained"
    return ""


def _name(parameters: int) -> str:
    return f"{parameters / 1e9:.2g}b" if parameters >= 1e9 else f"{parameters / 1e6:.3g}m"


def _divisor(dp_size: int, wanted: int) -> int:
    return max(n for n in range(1, max(min(wanted, dp_size), 1) + 1) if dp_size % n == 0)


DEFAULT_VOCAB = 4096  # of Python's standard library, the data of a run that names none


def is_here(data: config.DataConfig) -> bool:
    """Whether the data can be looked at. The default dataset is not built for this."""
    if data.mixture:
        return all(component.path.exists() for component in data.mixture.values())
    if data.path is not None:
        return data.path.exists()
    from fasttrain.data.corpus import standard_library_path

    return standard_library_path().exists()


def dataset_tokens(settings: config.Config) -> dict[str, float] | None:
    """Tokens to train on, by component; None: the data is not here, or not named yet.

    A vocabulary that is not that of the default dataset says that other data is meant.
    """
    data = settings.data
    unnamed = data.path is None and not data.mixture and settings.model.vocab not in (None, DEFAULT_VOCAB)
    if unnamed or not is_here(data):
        return None
    from fasttrain.data import training_data  # torch, which a plan does without otherwise

    return {name: float(len(dataset.split("train"))) for name, dataset in training_data(data).datasets.items()}


def vocab_of(settings: config.Config) -> int:
    """Rows of the embedding, as the trainer decides them."""
    if settings.model.vocab:
        return settings.model.vocab
    data = settings.data
    if data.path is None and not data.mixture:
        needed = DEFAULT_VOCAB
    elif is_here(data):
        from fasttrain.data import training_data

        needed = training_data(data).first.vocab
    elif data.vocab:
        needed = data.vocab
    else:
        raise ValueError(
            f"model.vocab is not set, and the data that would tell it is not here ({data.path or 'data.mixture'}); set "
            "model.vocab"
        )
    return -(-needed // 64) * 64
