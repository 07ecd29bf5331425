"""What is going to be tried: the user's settings, as short as a certificate needs them, and the numbers of ranks."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fasttrain.checkpoint.resume import Change, changed_settings
from fasttrain.config import Config
from fasttrain.config_toml import to_toml
from fasttrain.distributed.runtime import resolve_precision


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings are those of the run `whole`."""

    settings: Config
    changed: list[Change]  # against the user's
    digest: str  # of the user's
    kill_at: int
    ranks: int
    other_ranks: int  # 0: not tried
    gpus: int  # 0: on the CPU

    @property
    def precision(self) -> str:
        return resolve_precision(self.settings.parallel.precision, torch.device("cuda" if self.gpus else "cpu"))

    def moved(self, checkpoint: Path) -> Config:
        """The same for the other number of ranks, whose share of a step may need smaller micro-batches."""
        calm = self.calm(checkpoint)
        micro = math.gcd(calm.batch.micro, calm.batch.sequences // self.other_ranks)
        return replace(calm, batch=replace(calm.batch, micro=micro))

    def calm(self, checkpoint: Path) -> Config:
        """Without dropout, from a checkpoint of the whole run."""
        model = replace(self.settings.model, dropout=0.0, attention_dropout=0.0)
        return replace(self.settings, model=model, resume=str(checkpoint), from_hf=None)  # one place to start from


def plan(
    settings: Config,
    *,
    steps: int,
    kill_at: int | None = None,  # None: in the middle
    save_every: int = 1,
    ranks: int | None = None,  # None: as many as there are GPUs; as few as possible on a CPU
    other_ranks: int | None = None,  # None: any other number that is possible; 0: none
) -> Trial:
    """The trial that is asked for. A mistake of the user's shows here."""
    if "RANK" in os.environ:
        raise ValueError("it starts its ranks itself; call it without torchrun")
    if settings.resume not in ("auto", "never"):
        raise ValueError(f"--resume {settings.resume}: the runs that are compared begin at step 0; leave it out")
    if kill_at is None:
        kill_at = max(steps // 2 // save_every, 1) * save_every
    if kill_at % save_every or not 0 < kill_at < steps:
        raise ValueError(
            f"--kill-at {kill_at} must be a step that is saved, a multiple of --save-every ({save_every}), and below "
            f"--steps ({steps})"
        )
    gpus = torch.cuda.device_count() if settings.parallel.device != "cpu" else 0
    ranks = _ranks(settings, gpus, ranks)
    other_ranks = _other_ranks(settings, gpus, ranks, other_ranks)
    short = shortened(settings, steps=steps, save_every=save_every)
    before = to_toml(replace(settings, out=Path("run"), resume="auto"))  # equal for equal runs, wherever they are
    return Trial(
        settings=short, changed=changed_settings(before, short), digest=hashlib.sha256(before.encode()).hexdigest(),
        kill_at=kill_at, ranks=ranks, other_ranks=other_ranks, gpus=gpus,
    )  # fmt: skip


def shortened(settings: Config, *, steps: int, save_every: int) -> Config:
    """The same run in fewer steps, whose checkpoints all stay, and without what is no part of its state."""
    optim, validation = settings.optim, settings.validation
    decay = optim.decay_fraction if optim.schedule == "wsd" else 0.0
    return replace(
        settings,
        resume="auto",
        batch=replace(settings.batch, steps=steps),
        optim=replace(optim, warmup=min(optim.warmup, steps // 4, int(steps * (1 - decay)))),
        checkpoint=replace(settings.checkpoint, every=save_every, keep_last=steps),
        validation=replace(validation, every=0, sequences=min(validation.sequences, 1), sample=""),
        log=replace(settings.log, tensorboard=False, wandb=""),
    )


def _ranks(settings: Config, gpus: int, asked: int | None) -> int:
    most, micro = gpus or settings.parallel.dp_replicate, settings.batch.micro
    possible = (n for n in range(most, 0, -1) if not _trouble(settings, gpus, n, micro))
    ranks = next(possible, most) if asked is None else asked
    if trouble := _trouble(settings, gpus, ranks, micro):
        raise ValueError(f"--ranks {ranks}: {trouble}")
    return ranks


def _other_ranks(settings: Config, gpus: int, ranks: int, asked: int | None) -> int:
    if asked is None:
        others = (*range(ranks - 1, 0, -1), *range(ranks + 1, (gpus or 4 * ranks) + 1))
        return next((n for n in others if not _trouble(settings, gpus, n)), 0)
    if asked == ranks:
        raise ValueError(f"--other-ranks {asked} is the number of ranks itself; choose another, or 0 for none")
    if asked and (trouble := _trouble(settings, gpus, asked)):
        raise ValueError(f"--other-ranks {asked}: {trouble}")
    return asked


def _trouble(settings: Config, gpus: int, ranks: int, micro: int = 1) -> str:
    """Why the settings do not run on so many ranks; empty: they do."""
    sequences, replicas = settings.batch.sequences, settings.parallel.dp_replicate
    if gpus and ranks > gpus:
        return f"there are {gpus} GPUs"
    if ranks % replicas:
        return f"it must be a multiple of parallel.dp_replicate ({replicas})"
    if sequences % (ranks * micro):
        return (
            f"batch.sequences ({sequences}) must be a multiple of {ranks * micro}, ranks times batch.micro ({micro}); "
            "change one of the three"
        )
    return ""
