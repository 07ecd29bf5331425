"""How fast a run goes now: means over its last steps, without the first, which compile."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

_STEPS = 20


class _Step(NamedTuple):
    seconds: float
    tokens: float
    waited: float  # seconds
    used: float  # seconds that a perfect device would have taken


class Pace:
    """Of the last steps of this process. The first counts only as long as it is the only one."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=_STEPS)
        self._settled = False

    def add(self, values: Mapping[str, float]) -> None:
        seconds = values["step_seconds"]
        if len(self._steps) == 1 and not self._settled:
            self._steps.clear()
            self._settled = True
        tokens, used = values["tokens_per_second"] * seconds, values["mfu"] * seconds
        self._steps.append(_Step(seconds, tokens, values["data_wait"], used))

    @property
    def tokens_per_second(self) -> float:
        return sum(step.tokens for step in self._steps) / self._seconds

    @property
    def mfu(self) -> float:
        return sum(step.used for step in self._steps) / self._seconds

    @property
    def data_share(self) -> float:
        """Of the time, that was spent waiting for data."""
        return sum(step.waited for step in self._steps) / self._seconds

    def remaining(self, steps: int) -> float | None:
        """Seconds that so many steps will take; None: too early to say."""
        return steps * self._seconds / len(self._steps) if self._settled else None

    @property
    def _seconds(self) -> float:
        return sum(step.seconds for step in self._steps)
