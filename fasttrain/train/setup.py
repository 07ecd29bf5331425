"""What a run consists of, and how it comes about: data -> model -> optimizer -> progress, new or from a checkpoint."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fasttrain
from fasttrain.checkpoint import Checkpoints, before_run, checkpoint_bytes, restore
from fasttrain.config import Config, to_toml
from fasttrain.data import Batch, Batches, Skip, TrainingData, training_data
from fasttrain.data.lint.gate import suspicions
from fasttrain.data.segments import Stretch, record, with_paths
from fasttrain.distributed.parallelize import compiles, distribute
from fasttrain.distributed.runtime import Runtime
from fasttrain.hf.load import load_pretrained, tokenizer_doubts
from fasttrain.model import Decoder, flops_per_token, num_parameters
from fasttrain.monitor import Judges
from fasttrain.optim import make_optimizer, make_scaler
from fasttrain.tools.plan.sizes import Exact, at_start
from fasttrain.tools.profiling import check as check_profile
from fasttrain.tools.validation import ValidationSet, validation_sets
from fasttrain.train.resume import (
    CHECKPOINTS,
    MOVES,
    Change,
    Progress,
    changed_content,
    changes,
    origin_after,
    starting_point,
)


@dataclass(kw_only=True)
class Run:
    """All that a run consists of."""

    settings: Config
    runtime: Runtime
    data: TrainingData
    batches: Batches
    validation: dict[str, ValidationSet]
    model: Decoder
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    progress: Progress
    compiled: bool
    why_not: str  # blocks are not compiled
    came_from: Path | None  # the checkpoint that it goes on from
    damaged: list[str]  # what is wrong with newer ones
    changed: list[Change]  # against the settings of that checkpoint
    suspected: list[str]  # faults of the data
    doubts: str  # whether data and pretrained weights belong together
    judges: Judges
    plan: Exact
    stopped: str = ""  # by its judges, and why

    @property
    def has_lost_patience(self) -> bool:
        return 0 < self.settings.validation.patience <= self.progress.misses

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says beside weights and averages."""
        return {
            "progress": self.progress.facts(),
            "config": to_toml(self.settings),
            "dataset": self.data.digest,
            "datasets": self.data.digests,
            "used": self.batches.used_at(self.progress.step),
            "judges": self.judges.state(),
            "world": self.runtime.world,
            "versions": {
                "fasttrain": fasttrain.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def stretch(self) -> Stretch:
        """What decides about the batches from here on."""
        settings = self.settings
        elsewhere = self.came_from is not None and self.came_from.parent != settings.out / CHECKPOINTS
        return Stretch(
            step=self.progress.step,
            origin=self.progress.origin,
            sequences=settings.batch.sequences,
            world=self.runtime.world,
            data=with_paths(settings.data, self.data),
            datasets=self.data.digests,
            before=str(self.came_from) if elsewhere else None,
        )

    def move(self, skip: Skip) -> None:
        """Take other batches from a step on."""
        origin = self.progress.origin
        self.progress = replace(self.progress, origin=replace(origin, skips=(*origin.skips, skip)))
        self.batches = _batches(self.settings, self.runtime, self.data, self.progress)
        if self.runtime.is_first:
            record(self.settings.out, self.stretch())

    def save(self, checkpoints: Checkpoints, loss: float | None) -> None:
        step, facts = self.progress.step, self.facts()
        checkpoints.save(self.model, self.optimizer, self.scaler, step=step, facts=facts, loss=loss)

    def read(self, step: int) -> list[Batch]:
        """A rank's micro-batches of a step."""
        batch = self.batches.at(step)
        if self.runtime.device.type == "cuda":
            batch = batch.pin_memory()
        return batch.split(self.settings.batch.micro)


def prepare(settings: Config, runtime: Runtime) -> Run:
    """Everything before the first step. A mistake of the user's shows here."""
    together = runtime.world * settings.batch.micro
    if settings.batch.sequences % together:
        raise ValueError(
            f"batch.sequences ({settings.batch.sequences}) must be a multiple of {together}: {runtime.world} ranks "
            f"with micro-batches of {settings.batch.micro} (batch.micro)"
        )
    data = training_data(settings.data)
    suspected = suspicions(data.datasets.values(), settings.data) if runtime.is_first else []
    vocab = _vocab(settings, data)
    tokens = settings.batch.steps * settings.batch.sequences * settings.data.sequence
    flops = tokens * flops_per_token(settings.model, vocab, settings.data.sequence)
    compiled, why = compiles(settings.parallel, runtime, flops)
    model = _model(settings, vocab, runtime, compiled=compiled)
    optimizer = make_optimizer(model, settings.optim, runtime.device)
    scaler = make_scaler(runtime.precision, runtime.device)
    progress, changed = Progress(), []
    judges = Judges(settings, vocab=vocab, scaled=scaler.is_enabled())
    damaged: list[str] = []
    checkpoint = starting_point(settings, runtime, report=damaged.append)
    doubts = ""
    if checkpoint is None:
        if settings.from_hf is not None:
            doubts = tokenizer_doubts(settings.from_hf, data)
        give_initial_weights(model, settings)
    else:
        facts = checkpoint.facts
        changed = changes(facts["config"], settings) + changed_content(facts["datasets"], data.digests)
        progress = Progress.of(facts["progress"])
        progress = replace(progress, origin=origin_after(progress, facts, changed, settings, data.digests))
        restore(checkpoint, model, optimizer, scaler, group=runtime.files)
        if not any(change.key.startswith(MOVES) for change in changed):  # other batches have other noise
            judges.restore(facts["judges"])
    _check_room(settings, vocab)
    check_profile(settings.log.profile, left=settings.batch.steps - progress.step)
    batches = _batches(settings, runtime, data, progress)
    if batches.end is not None and batches.end < settings.batch.steps:
        raise ValueError(
            f"data.mixture: every component has reached its epochs at step {batches.end} of {settings.batch.steps}; "
            "raise the epochs of one, or lower batch.steps"
        )
    tokens_of = {name: float(len(dataset.split("train"))) for name, dataset in data.datasets.items()}
    plan = at_start(settings, vocab=vocab, world=runtime.world, dataset=tokens_of)
    if plan.contradictions and checkpoint is None:
        raise ValueError("; ".join(plan.contradictions))
    return Run(
        settings=settings, runtime=runtime, data=data, batches=batches, model=model, optimizer=optimizer,
        validation=validation_sets(data, settings, runtime), scaler=scaler, progress=progress, changed=changed,
        came_from=checkpoint.path if checkpoint else None, damaged=damaged, suspected=suspected, doubts=doubts,
        judges=judges, compiled=compiled, why_not=why, plan=plan,
    )  # fmt: skip


def _batches(settings: Config, runtime: Runtime, data: TrainingData, progress: Progress) -> Batches:
    return Batches(
        data.components("train"),
        sequence=settings.data.sequence,
        sequences=settings.batch.sequences,
        seed=settings.data.seed,
        document_mask=settings.data.document_mask,
        rank=runtime.rank,
        world=runtime.world,
        origin=progress.origin,
    )


def _check_room(settings: Config, vocab: int) -> None:
    """A disk that the run would fill is an error now, not in the night."""
    directory = settings.out / CHECKPOINTS
    size = checkpoint_bytes(directory, num_parameters(settings.model, vocab).total)
    room = before_run(directory, settings.checkpoint, size=size, steps=settings.batch.steps)
    if room.state != "enough":
        raise ValueError(f"no room for the checkpoints of this run: {room}")


def _vocab(settings: Config, data: TrainingData) -> int:
    """Rows of the embedding."""
    needed = data.first.vocab
    vocab = settings.model.vocab or -(-needed // 64) * 64
    if vocab < needed:
        remedy = "raise it, or leave it out"
        if settings.from_hf is not None:
            remedy = f"it is that of {settings.from_hf}: prepare the data with --tokenizer {settings.from_hf}"
        raise ValueError(
            f"model.vocab ({vocab}) is smaller than the vocabulary of the data, {needed} ({data.first.path}); {remedy}"
        )
    return vocab


def _model(settings: Config, vocab: int, runtime: Runtime, *, compiled: bool) -> Decoder:
    """The decoder on its ranks, with memory for this rank's share of the weights, and no weights yet."""
    with torch.device("meta"):
        model = Decoder(settings.model, vocab=vocab, sequence=settings.data.sequence, z_loss=settings.optim.z_loss)
    distribute(model, settings.parallel, runtime, compiled=compiled)
    return model.to_empty(device=runtime.device)


def give_initial_weights(model: Decoder, settings: Config) -> None:
    """Random ones, or those of the checkpoint that the run starts from."""
    if settings.from_hf is None:
        model.init_weights(settings.seed)
    else:
        load_pretrained(model, settings.from_hf)
