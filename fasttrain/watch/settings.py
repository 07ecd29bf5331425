"""Settings of what is watched: a section of the configuration, once the trainer reads them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What a run looks out for, and what it does then."""

    spike: Literal["warn", "skip", "rollback", "stop"] = "rollback"
    """When the loss spikes or is not finite; rollback: to the last good checkpoint, then past those batches."""
    rollbacks: int = 3
    """Rollbacks before the run stops instead."""
    first: int = 96
    """Steps at the start of a run in which nothing but a value that is not finite counts as a spike."""
    slowdown: float = 0.2
    """Lasting slow-down of steps to report, as a share; 0: none."""
    disk: Literal["pause", "stop"] = "pause"
    """When there is no room for a checkpoint; pause: wait until there is."""
    envelope: tuple[tuple[float, float, float], ...] = ()
    """Losses to expect: rows of tokens, lowest, highest. An alarm when the loss is outside for 20 steps in a row."""

    def __post_init__(self) -> None:
        for name, least in (("rollbacks", 0), ("first", 64), ("slowdown", 0.0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"watch.{name} ({value}) must be at least {least}")
