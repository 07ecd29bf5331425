"""Spikes of the loss and of the gradient norm: told from noise every step, by the same rule on every rank.

Two series are watched, the loss and the logarithm of the gradient norm. Each goes through the same steps:

    residual    value - median of the last 32 values                   takes the trend out
    z           (residual - median of the last 256 residuals) / their spread, from the quartiles
    score       max(0, score + min(z, 7) - 4)                          what lasts adds up, what is over decays

until the score reaches a limit: after 4 steps of z >= 7 for the loss and 6 for the norm, or more steps of less. Then a
loss is a spike. A norm that rises alone is a warning, no more: it also does so when a model leaves a plateau. A single
step adds at most 3 to a score, however wild it is: one odd batch, which clipping has dealt with, is nothing.

Medians and quartiles ignore the odd ones, and a scale that comes from the run itself fits small and large batches.
Values of a spike stay in the windows, so that a level which remains becomes the usual one.

Everything is a function of the values observed. They are sums over all ranks, so all ranks decide alike.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fasttrain.events import Anomaly

LOSS, NORM = "loss", "gradient norm"

QUARTILES = 1.349  # standard deviations between the quartiles of a normal distribution
_RECENT = 32  # steps whose median is the present level; it follows a new level after half as many
_USUAL = 256  # steps that say what noise is usual
_LARGEST = 7.0  # z that one step can count for
_EASY = 4.0  # z that is not evidence: the score grows above it and decays below
_NEEDED = {LOSS: 12.0, NORM: 18.0}  # score
_LASTING: dict[str, Literal["warning", "spike"]] = {LOSS: "spike", NORM: "warning"}
# Smallest spread, for runs with next to no noise. z = 6 is then 0.06 nats, or twice the usual norm.
_QUIET = {LOSS: 0.01, NORM: 0.12}
_SKIPPED = 50  # infinite norms in a row that a loss scale may explain: it starts at 2^16, and halves


class SpikeDetector:
    """observe() every step. Its state goes into a checkpoint, and back after a rollback.

    A run whose batches or data change gets a new detector: the noise of the former ones says nothing about these.
    """

    def __init__(
        self,
        *,
        first: int = 96,  # steps at the start of a run in which only values that are not finite count; 64 or more
        scaled: bool = False,  # fp16: an infinite norm with a finite loss is the loss scale's business
    ) -> None:
        self._series = {name: _Series(name, first) for name in (LOSS, NORM)}
        self._scaled, self._skipped = scaled, 0

    def observe(self, loss: float, norm: float) -> Anomaly | None:
        """What is wrong with a step, given its loss and gradient norm over all ranks; None: nothing."""
        if not math.isfinite(loss):
            return Anomaly(kind="not finite", is_new=True, series=LOSS, value=loss, steps=1)
        anomalies = [self._series[LOSS].observe(loss, loss)]
        if math.isfinite(norm):
            self._skipped = 0
            anomalies.append(self._series[NORM].observe(norm, math.log(max(norm, 1e-30))))
        else:
            self._skipped += 1
            if not self._scaled or self._skipped >= _SKIPPED:
                return Anomaly(kind="not finite", is_new=True, series=NORM, value=norm, steps=self._skipped)
        found = [anomaly for anomaly in anomalies if anomaly]
        return max(found, key=lambda one: (_GRAVITY[one.kind], one.is_new), default=None)  # of equal ones, the loss

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint's metadata."""
        return {name: series.state() for name, series in self._series.items()} | {"skipped": self._skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue as if the steps since state() had not been."""
        for name, series in self._series.items():
            series.restore(state[name])
        self._skipped = state["skipped"]


_GRAVITY = {"warning": 1, "spike": 2, "not finite": 3}


class _Series:
    def __init__(self, name: str, first: int) -> None:
        self._name, self._first = name, first
        self._recent, self._residuals = Window(_RECENT), Window(_USUAL)
        self._seen, self._score, self._steps, self._reported = 0, 0.0, 0, False

    def observe(self, shown: float, value: float) -> Anomaly | None:
        """shown: the value as people know it; that of the norm is not its logarithm."""
        anomaly = None
        self._seen += 1
        if self._recent.is_full:
            residual = value - self._recent.median
            if self._seen > self._first:
                anomaly = self._assess(shown, value, residual)
            self._residuals.add(residual)
        self._recent.add(value)
        return anomaly

    def _assess(self, shown: float, value: float, residual: float) -> Anomaly | None:
        usual = self._residuals.median
        z = (residual - usual) / max(self._residuals.spread, _QUIET[self._name])
        # After a rise, what is left of the score is what would make the next alarm early: bound it.
        self._score = min(max(0.0, self._score + min(z, _LARGEST) - _EASY), 2 * _NEEDED[self._name])
        self._steps = self._steps + 1 if self._score else 0
        self._reported = self._reported and self._score > 0
        if not self._reported and self._score < _NEEDED[self._name]:
            return None
        expected = value - residual + usual
        anomaly = Anomaly(
            kind=_LASTING[self._name],
            is_new=not self._reported,
            series=self._name,
            value=shown,
            expected=expected if self._name == LOSS else math.exp(expected),
            z=z,
            steps=self._steps,
        )
        self._reported = True
        return anomaly

    def state(self) -> dict[str, Any]:
        return dict(
            recent=self._recent.values(), residuals=self._residuals.values(), seen=self._seen,
            score=self._score, steps=self._steps, reported=self._reported,
        )  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        self._recent = Window(_RECENT, state["recent"])
        self._residuals = Window(_USUAL, state["residuals"])
        self._seen, self._score = state["seen"], state["score"]
        self._steps, self._reported = state["steps"], state["reported"]


class Window:
    """At most `size` values, the last ones. Kept in order too: a median costs a look, not a sort."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._ordered: list[float] = []
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        if len(self._values) == self._values.maxlen:
            del self._ordered[bisect_left(self._ordered, self._values[0])]
        self._values.append(value)
        insort(self._ordered, value)

    @property
    def is_full(self) -> bool:
        return len(self._values) == self._values.maxlen

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def spread(self) -> float:
        """The standard deviation, if the values were normal: from the quartiles."""
        return (self.quantile(0.75) - self.quantile(0.25)) / QUARTILES

    def quantile(self, share: float) -> float:
        """Linear between neighbours."""
        place = share * (len(self._ordered) - 1)
        low = int(place)
        high = min(low + 1, len(self._ordered) - 1)
        return self._ordered[low] + (place - low) * (self._ordered[high] - self._ordered[low])

    def values(self) -> list[float]:
        """In the order of their arrival."""
        return list(self._values)
