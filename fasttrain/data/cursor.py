"""Where in the data a run is, apart from its step: what checkpoints and batches.jsonl remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from fasttrain.bounds import Bounds
from fasttrain.config import STEPS
from fasttrain.schema import build


class Skip(NamedTuple):
    """A run takes, from `step` on, the batches that would have come `steps` steps later."""

    step: Annotated[int, STEPS]
    steps: Annotated[int, STEPS]


@dataclass(frozen=True)
class DataCursor:
    """Where batches begin: a run that resumes with other settings continues in the data where it was."""

    step: Annotated[int, STEPS] = 0
    # samples of each component, by name
    used: dict[str, Annotated[int, Bounds(0, 2**62)]] = field(default_factory=dict)
    skips: tuple[Skip, ...] = ()  # since then

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> DataCursor:
        """Read what JSON makes of asdict(cursor)."""
        return build(cls, metadata)
