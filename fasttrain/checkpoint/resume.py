"""Where a run begins: at step 0, or at a checkpoint, with the settings that it was saved with or with others; and
where it goes back to.

What a setting means for the weights decides whether it may change. The shape of the model and the kind of optimizer may
not: the checkpoint has no place for them. Everything else may, and every difference is shown and recorded. A run whose
batches change in size, sequence or datasets continues in each dataset where it was: `DataCursor`.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from fasttrain.bounds import Bounds
from fasttrain.checkpoint.committed import Checkpoint, committed_paths, find, list_checkpoints, newest_valid, valid_at
from fasttrain.checkpoint.retention import quarantine
from fasttrain.checkpoint.state import misfit, restore
from fasttrain.config import STEPS, Config
from fasttrain.config_toml import flat, to_toml
from fasttrain.data.cursor import DataCursor
from fasttrain.distributed.collectives import on_all
from fasttrain.rundir import RunDir
from fasttrain.schema import build, parse

FIXED = ("model.", "optim.kind", "from_hf")  # prefixes of settings that cannot change
FREE = ("model.dropout", "model.attention_dropout")  # but these can
UNIMPORTANT = ("out", "resume")  # where a run is, and how it was started
CONTENT = "content"  # of a dataset; no setting, but it may have changed
MOVES = ("data.path", "data.mixture", "data.sequence", "batch.sequences", CONTENT)  # what batches depend on

Count = Annotated[int, Bounds(0, 2**62)]
Finite = Annotated[float, Bounds(-1e300, 1e300)]


class SavedProgress(TypedDict):
    """The Progress of a run."""

    step: Annotated[int, STEPS]
    tokens: Count
    cursor: DataCursor
    best_loss: float | None
    misses: Count
    rollbacks: Count


class SavedSeries(TypedDict):
    """What the detector of spikes knows of a series."""

    recent: list[Finite]
    residuals: list[Finite]
    seen: Count
    score: Finite
    steps: Count
    reported: bool


SavedMonitor = TypedDict("SavedMonitor", {"loss": SavedSeries, "gradient norm": SavedSeries, "skipped": Count})


class RunMetadata(TypedDict):
    """The metadata of a checkpoint that a run has saved."""

    progress: SavedProgress
    config: str  # TOML
    dataset: str  # digest of all data
    datasets: dict[str, str]  # digest of each
    used: dict[str, Count]  # samples of each
    monitor: SavedMonitor
    world_size: Annotated[int, Bounds(1, 10**6)]
    versions: dict[str, str]


def check_metadata(checkpoint: Checkpoint) -> None:
    """Raise unless the metadata are what a run saves: checksums only say that nobody has changed them since."""
    try:
        found: RunMetadata = build(RunMetadata, checkpoint.metadata, "metadata")
        if found["progress"]["step"] != checkpoint.step:
            raise ValueError(f"metadata.progress.step is {found['progress']['step']}, and step {checkpoint.step}")
        if found["used"].keys() != found["datasets"].keys():
            raise ValueError(f"metadata.used is of {', '.join(found['used'])}, not of {', '.join(found['datasets'])}")
        sequence = dict(flat(parse(found["config"], tomllib.loads))).get("data.sequence")
        build(Annotated[int, Bounds(1, 10**7)], sequence, "data.sequence of metadata.config")
    except ValueError as error:
        raise ValueError(f"checkpoint: {checkpoint.path} is not of a run of fasttrain: {error}") from None


def verify_run(checkpoint: Checkpoint, group: dist.ProcessGroup | None) -> None:
    """Raise unless every file is what a run has written, and the metadata are a run's."""
    checkpoint.verify(group)
    check_metadata(checkpoint)


def starting_point(settings: Config, group: dist.ProcessGroup, on_warning: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that the run resumes from, verified; on_warning() is told of corrupt ones. All ranks call it."""
    out, own = settings.out, RunDir(settings.out).checkpoints
    existing = list_checkpoints(own)
    if settings.resume == "never":
        if committed_paths(own):
            step = f"at step {existing[-1].step}" if existing else "whose checkpoints are corrupt"
            raise ValueError(f"{out} holds a run {step}, and --resume is never; choose another --out, or --resume auto")
        return None
    if settings.resume != "auto":
        chosen = find(settings.resume)
        if existing and chosen.path.parent.resolve() == own.resolve() and chosen.step < existing[-1].step:
            remedy = f"start another run from it: --resume {settings.resume} --out DIRECTORY"
            raise ValueError(f"{out} is at step {existing[-1].step}; to resume from step {chosen.step}, {remedy}")
        if not committed_paths(own):  # otherwise this run began there before, and was interrupted
            verify_run(chosen, group)
            return chosen
    corrupt: list[str] = []
    valid = newest_valid(own, group, on_warning=corrupt.append, verify=verify_run)
    if valid is None and committed_paths(own):  # readable or not: no new run is begun over them
        remedy = "start another run with --out, or copy a valid one there"
        raise ValueError(f"no checkpoint in {own} is valid ({'; '.join(corrupt)}); {remedy}")
    for text in corrupt:
        on_warning(text)
    return valid


def go_back(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    group: dist.ProcessGroup | None,
    *,
    steps: Sequence[range],  # the first of them that has a valid checkpoint
    origin: Path | None,  # and if none has: a checkpoint of another run
    on_warning: Callable[[str], None],
) -> Checkpoint | None:
    """Restore a run in progress from a checkpoint, and quarantine later ones; None: none is valid, nothing changed.

    It is verified as at a start, and has to fit: nothing is loaded before that. All ranks call it, no save is running.
    """

    def verify(checkpoint: Checkpoint, group: dist.ProcessGroup | None) -> None:
        verify_run(checkpoint, group)
        if misfits := [text for text in on_all(group, lambda: misfit(checkpoint, model, optimizer)) if text]:
            raise ValueError(misfits[0])

    places = (newest_valid(directory, group, on_warning, steps=asked, verify=verify) for asked in steps)
    found = next(filter(None, places), None) or (valid_at(origin, group, on_warning, verify) if origin else None)
    if found is not None:
        restore(found, model, optimizer, scaler, group=group)
        later = [checkpoint for checkpoint in list_checkpoints(directory) if checkpoint.step > found.step]
        quarantine(later, group)
    return found


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that differs from the checkpoint's."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def changed_settings(before: str, after: Config) -> list[Change]:
    """What differs between the settings of a checkpoint, as TOML, and those of now. Impossible ones are an error."""
    old, new = dict(flat(tomllib.loads(before))), dict(flat(tomllib.loads(to_toml(after))))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in UNIMPORTANT]
    if after.from_hf is None and "from_hf" in keys:  # a run that has begun needs it no more
        keys.remove("from_hf")
    found = [Change(key=key, before=old.get(key), after=new.get(key)) for key in keys]
    if impossible := [change for change in found if change.key.startswith(FIXED) and change.key not in FREE]:
        which, remedy = "; ".join(map(str, impossible)), "set them back, or start another run: --out DIRECTORY"
        raise ValueError(f"the checkpoint cannot be resumed with other settings: {which}; {remedy}")
    return found


def changed_content(before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    """Of datasets that both runs have, by name and digest."""
    return [
        Change(key=f"{CONTENT} of {name}" if name else CONTENT, before=before[name][:12], after=digest[:12])
        for name, digest in after.items()
        if before.get(name, digest) != digest
    ]


def moves_data(changes: list[Change]) -> bool:
    """Whether batches are other ones than before."""
    return any(change.key.startswith(MOVES) for change in changes)


def cursor_after(
    step: int,
    cursor: DataCursor,
    saved: Mapping[str, Any],  # the metadata of the checkpoint
    changes: list[Change],
    settings: Config,
    digests: Mapping[str, str],
) -> DataCursor:
    """Where the batches of the changed settings begin.

    A dataset that still has its name and content continues after as many tokens; any other one starts.
    """
    if not moves_data(changes):
        return cursor
    before = tomllib.loads(saved["config"])["data"]["sequence"]
    kept = {name: samples for name, samples in saved["used"].items() if digests.get(name) == saved["datasets"][name]}
    used = {name: -(-samples * before // settings.data.sequence) for name, samples in kept.items()}
    return DataCursor(step, used)
