"""Where a run begins: at step 0, or at a checkpoint, with the settings that it was saved with or with others.

What a setting means for the weights decides whether it may change. The shape of the model and the kind of optimizer may
not: the checkpoint has no place for them. Everything else may, and every difference is shown and recorded. A run whose
batches change in size, sequence or datasets goes on in each dataset where it was: `Origin`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fasttrain.checkpoint import Checkpoint, find, list_checkpoints, newest_sound, published
from fasttrain.config import Config, to_toml
from fasttrain.data import Origin
from fasttrain.distributed.runtime import Runtime

FIXED = ("model.", "optim.kind", "from_hf")  # prefixes of settings that cannot change
FREE = ("model.dropout", "model.attention_dropout")  # but these can
UNIMPORTANT = ("out", "resume")  # where a run is, and how it was started
CONTENT = "content"  # of a dataset; no setting, but it may have changed
MOVES = ("data.path", "data.mixture", "data.sequence", "batch.sequences", CONTENT)  # what batches depend on
CHECKPOINTS = "checkpoints"  # in a run's directory


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is; with the weights and the optimizer's averages, all there is to its state."""

    step: int = 0  # steps done
    tokens: int = 0  # trained on
    origin: Origin = field(default_factory=Origin)
    best_loss: float | None = None  # of all validations, on the held-out documents
    misses: int = 0  # validations in a row since then
    rollbacks: int = 0  # so far

    def after_step(self, settings: Config) -> Progress:
        tokens = settings.batch.sequences * settings.data.sequence
        return replace(self, step=self.step + 1, tokens=self.tokens + tokens)

    def after_validation(self, loss: float) -> Progress:
        if self.best_loss is None or loss < self.best_loss:
            return replace(self, best_loss=loss, misses=0)
        return replace(self, misses=self.misses + 1)

    def facts(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Progress:
        """From a checkpoint."""
        return cls(**{**facts, "origin": Origin.of(facts["origin"])})


def starting_point(settings: Config, runtime: Runtime, report: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that the run goes on from, verified; report() is told of those that are damaged."""
    own = settings.out / CHECKPOINTS
    existing = list_checkpoints(own)
    if settings.resume == "never":
        if published(own):
            step = f"at step {existing[-1].step}" if existing else "whose checkpoints are damaged"
            raise ValueError(
                f"{settings.out} holds a run {step}, and --resume is never; choose another directory (--out), or "
                "--resume auto"
            )
        return None
    if settings.resume != "auto":
        chosen = find(settings.resume)
        if existing and chosen.path.parent.resolve() == own.resolve() and chosen.step < existing[-1].step:
            raise ValueError(
                f"{settings.out} is at step {existing[-1].step}; to go on from step {chosen.step}, start another run "
                f"from it: --resume {settings.resume} --out DIRECTORY"
            )
        if not published(own):  # otherwise this run began there before, and was interrupted
            chosen.verify(runtime.files)
            return chosen
    damaged: list[str] = []
    sound = newest_sound(own, runtime.files, report=damaged.append)
    if sound is None and published(own):  # readable or not: no new run is begun over them
        raise ValueError(
            f"no checkpoint in {own} is sound ({'; '.join(damaged)}); start another run with --out, or copy a sound "
            "one there"
        )
    for text in damaged:
        report(text)
    return sound


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that differs from the checkpoint's."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"

    @property
    def is_possible(self) -> bool:
        return not self.key.startswith(FIXED) or self.key in FREE


def changes(before: str, after: Config) -> list[Change]:
    """What differs between the settings of a checkpoint, as TOML, and those of now. Impossible ones are an error."""
    old, new = _flat(tomllib.loads(before)), _flat(tomllib.loads(to_toml(after)))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in UNIMPORTANT]
    if after.from_hf is None and "from_hf" in keys:  # a run that has begun needs it no more
        keys.remove("from_hf")
    found = [Change(key=key, before=old.get(key), after=new.get(key)) for key in keys]
    if impossible := [change for change in found if not change.is_possible]:
        raise ValueError(
            f"the checkpoint cannot go on with other settings: {'; '.join(map(str, impossible))}. Set them back, or "
            "start another run: --out DIRECTORY"
        )
    return found


def changed_content(before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    """Of datasets that both runs have, by name and digest."""
    return [
        Change(key=f"{CONTENT} of {name}" if name else CONTENT, before=before[name][:12], after=digest[:12])
        for name, digest in after.items()
        if before.get(name, digest) != digest
    ]


def origin_after(
    progress: Progress, facts: Mapping[str, Any], changes: list[Change], settings: Config, digests: Mapping[str, str]
) -> Origin:
    """Where the batches of the changed settings begin.

    A dataset that has its name and content still goes on after as many tokens; any other one begins.
    """
    if not any(change.key.startswith(MOVES) for change in changes):
        return progress.origin
    before = _flat(tomllib.loads(facts["config"]))["data.sequence"]
    kept = {name: samples for name, samples in facts["used"].items() if digests.get(name) == facts["datasets"][name]}
    used = {name: -(-samples * before // settings.data.sequence) for name, samples in kept.items()}
    return Origin(progress.step, used)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
