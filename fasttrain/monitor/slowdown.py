"""Slow-downs that last: which part of a step takes longer, and which rank the others wait for.

Each rank keeps its split of the last 40 steps. Every 10 steps it sends the others one small vector, the medians of its
parts; so all ranks hold the same table of (rank, part), and come to the same conclusion without another word:

    usual      medians over the first steps of the run that are worth comparing with
    excess     now - usual, of each rank and part
    slow       the excess of a whole step is 0.6 of the threshold or more. Half of the 40 steps have to be slow for
               that, and a regression of the whole threshold gets there within 45

In a synchronous step all ranks take equally long: one works longer, the others wait for it. So the culprit is the rank
with the largest excess beside waiting, if it is alone with it; and the part is its largest excess. If no rank works
longer and all wait longer, the waiting itself is the cause: the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from fasttrain.monitor.exchange import STEPS

WAIT = "wait"  # the part in which a rank waits for others

_BASE = 160  # steps of the baseline
_SETTLING = 20  # steps before it, of a process: compilation, caches, clocks
_RAISED, _BACK = 0.6, 0.3  # of the threshold: reported, and over
_AGAIN = 1.5  # times what was reported: so much slower is news again
_NOISE = 5.5  # standard errors of the median that an excess has to exceed, on a machine that is never quiet
_ALONE = 0.5  # the others' excess, as a share of the culprit's, up to which it is the only one


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Steps take longer than they used to, or do no more."""

    kind: Literal["slow", "over"]
    seconds: float  # of a step now
    usual: float  # of a step before
    part: str = ""  # that takes longer
    rank: int | None = None  # that causes it; None: all alike
    part_seconds: float = math.nan  # of that part there
    part_usual: float = math.nan
    sensors: dict[str, tuple[float, float]] | None = None  # of that rank: usual and now

    def __str__(self) -> str:
        change = f"{self.usual * 1e3:.4g} -> {self.seconds * 1e3:.4g} ms a step"
        if self.kind == "over":
            return f"steps are as fast as before: {change}"
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        readings = "".join(f"; {name} {a:.4g} -> {b:.4g}" for name, (a, b) in (self.sensors or {}).items())
        return (
            f"steps take {self.seconds / self.usual - 1:.0%} longer ({change}): {self.part} of {where}, "
            f"{self.part_usual * 1e3:.4g} -> {self.part_seconds * 1e3:.4g} ms{readings}"
        )

    def evidence(self) -> dict[str, Any]:
        """The evidence, for an incident."""
        return {name: fact for name, fact in asdict(self).items() if name != "kind"}


class SlowdownDetector:
    """Compares the table of all ranks with the run's own past. Of a process: another one may be on other machines."""

    def __init__(self, parts: Sequence[str], sensors: Sequence[str] = (), *, threshold: float = 0.2) -> None:
        if threshold <= 0:
            raise ValueError(f"slowdown: threshold ({threshold}) must be above 0, as 0.2 for 20%")
        self._parts, self._sensors, self._threshold = tuple(parts), tuple(sensors), threshold
        self._past: list[np.ndarray] = []
        self._reported = 0.0  # excess of a step, as a share; 0: none

    def observe(self, rows: Sequence[Sequence[float]], steps: int) -> Slowdown | None:
        """What is new after `steps` steps of this process, given each rank's vector; None: nothing."""
        table = np.array(rows)  # (ranks, columns as in Medians.vector)
        if steps < _SETTLING + STEPS:
            return None
        if steps <= _SETTLING + _BASE and not self._reported:
            self._past.append(table)
        if steps < _SETTLING + 2 * STEPS:  # nothing to compare with yet
            return None
        usual = np.median(self._past, axis=0)
        before, now = float(np.median(usual[:, 0])), float(np.median(table[:, 0]))
        excess, limit = now / before - 1, self._limit(usual)
        if excess >= _AGAIN * self._reported + limit:
            news = self._explain(table, usual)
            self._reported = max(excess, news.seconds / news.usual - 1)
            return news
        if self._reported and excess < limit * _BACK / _RAISED:
            self._reported = 0.0
            return Slowdown(kind="over", seconds=now, usual=before)
        return None

    def _limit(self, usual: np.ndarray) -> float:
        """Smallest excess to report: of the threshold, or what noise cannot explain."""
        noise = float(np.median(usual[:, 1] / usual[:, 0])) * 1.25 / math.sqrt(STEPS)  # of a median of normal values
        return max(_RAISED * self._threshold, _NOISE * noise)

    def _explain(self, table: np.ndarray, usual: np.ndarray) -> Slowdown:
        before, now = (float(np.median(figures[:, 2])) for figures in (usual, table))
        parts = slice(3, 3 + len(self._parts))
        rank, part = self._cause(table[:, parts] - usual[:, parts], now - before)
        ranks = slice(None) if rank is None else slice(rank, rank + 1)
        was, then = np.median(usual[ranks], axis=0), np.median(table[ranks], axis=0)
        readings = {name: (float(was[n]), float(then[n])) for n, name in enumerate(self._sensors, parts.stop)}
        return Slowdown(
            kind="slow",
            seconds=now,
            usual=before,
            part=self._parts[part],
            rank=rank,
            part_seconds=float(then[parts][part]),
            part_usual=float(was[parts][part]),
            sensors={name: both for name, both in readings.items() if not math.isnan(sum(both))},
        )

    def _cause(self, excess: np.ndarray, whole: float) -> tuple[int | None, int]:  # (ranks, parts), of a whole step
        """The rank, or None for all alike, and the number of the part."""
        working = [number for number, part in enumerate(self._parts) if part != WAIT]
        own = excess[:, working].sum(axis=1)
        leader = int(own.argmax())
        if own[leader] < _ALONE * whole and WAIT in self._parts:
            return None, self._parts.index(WAIT)
        others = np.delete(own, leader)
        if not len(others) or float(np.median(others)) <= _ALONE * own[leader]:
            return leader, max(working, key=lambda part: excess[leader, part])
        return None, max(working, key=lambda part: float(np.median(excess[:, part])))
