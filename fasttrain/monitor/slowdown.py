"""Slow-downs that last: which phase of a step takes longer, and which rank the others wait for.

Each rank keeps the phases of its last 40 steps. Every 10 steps it sends the others one small vector, the medians of its
phases; so all ranks hold the same table of (rank, phase), and come to the same conclusion without another word:

    usual      medians over the first steps of the run that are worth comparing with
    excess     now - usual, of each rank and phase
    slow       the excess of a whole step is the threshold or more, in the 40 steps and in the recent ones. More than
               half of the 40 have to be slow for that

In a synchronous step all ranks take equally long: one works longer, the others wait for it. So the culprit is the rank
with the largest excess besides waiting, if it is alone with it; and the phase is its largest excess. If no rank works
longer and all wait longer, the waiting itself is the cause: the network.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from timeit import timeit
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from fasttrain.distributed.collectives import on_all
from fasttrain.monitor.spikes import QUARTILES

STEPS = 40  # of the median that says whether steps are slow
RECENT = 16  # and of those that say why: by the time that most of the 40 are slow, all of these are
EVERY = 10  # steps between two exchanges

PHASES = ("data", "wait", "forward", "backward", "optimizer", "step", "record", "checkpoint")  # that may become slow
WAIT = PHASES.index("wait")  # for other ranks
SHARED = ("forward", "backward", "optimizer")  # phases with collectives in them, where ranks keep pace with the slowest
SENSORS = ("sm_clock", "temperature", "power", "throttled_power", "throttled_heat", "throttled_hardware")


class Medians:
    """One rank's own figures: the phases of its last steps, and what its sensors say."""

    def __init__(self) -> None:
        self._steps: deque[list[float]] = deque(maxlen=STEPS)
        self._readings: Mapping[str, float] = {}

    def add(self, split: Mapping[str, float], readings: Mapping[str, float] | None = None) -> None:
        """The seconds of a step by phase; phases that a step did not have took none."""
        self._steps.append([split.get(phase, 0.0) for phase in PHASES])
        self._readings = readings or {}

    def vector(self) -> list[float]:
        """To be exchanged: median and spread of whole steps; of recent ones the median, whole and by phase; sensors."""
        table = np.array(self._steps)  # (steps, phases)
        whole = table.sum(axis=1)
        low, middle, high = np.quantile(whole, (0.25, 0.5, 0.75)).tolist()
        recent = np.median(np.column_stack([whole, table])[-RECENT:], axis=0)
        readings = [self._readings.get(name, math.nan) for name in SENSORS]
        spread = (high - low) / QUARTILES
        return [middle, spread, *recent.tolist(), *readings]


def probe(device: torch.device, rows: int = 512, repeats: int = 10) -> float:
    """Seconds of a matmul on this rank alone, the mean of several. Waits for the device.

    Ranks keep pace with the slowest wherever a phase of the step has collectives in it, and then all of them look slow.
    Equal work that none shares with another tells them apart. The fastest matmul would not: a rank that gets its
    processor for 5 ms in 50 does one of 3 ms at full speed.
    """
    a = torch.ones(rows, rows, device=device)

    def work() -> None:
        torch.mm(a, a)
        if device.type != "cpu":
            torch.accelerator.synchronize()

    work()  # warms up
    return timeit(work, number=repeats) / repeats


def slowest(seconds: Sequence[float], margin: float = 0.15) -> int | None:
    """The rank that took longer for equal work than the others did, by `margin` or more; None: no one."""
    rank = max(range(len(seconds)), key=lambda r: seconds[r])
    others = [s for r, s in enumerate(seconds) if r != rank]
    return rank if others and seconds[rank] >= (1 + margin) * median(others) else None


_BASE = 160  # steps of the baseline
_SETTLING = 20  # steps before it, of a process: compilation, caches, clocks
_BACK = 0.3  # of the threshold: the slow-down is over
_AGAIN = 1.5  # times what was reported: so much slower is news again
_NOISE = 5.5  # standard errors of the median that an excess has to exceed, on a machine that is never quiet
_ALONE = 0.5  # the others' excess, as a share of the culprit's, up to which it is the only one


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Steps take longer than they used to, or do no more."""

    kind: Literal["slow", "over"]
    seconds: float  # of a step now
    usual: float  # of a step before
    phase: str = ""  # that takes longer
    rank: int | None = None  # that causes it; None: all alike
    phase_seconds: float = math.nan  # of that phase there
    phase_usual: float = math.nan
    sensors: dict[str, tuple[float, float]] | None = None  # of that rank: usual and now

    def __str__(self) -> str:
        change = f"{self.usual * 1e3:.4g} -> {self.seconds * 1e3:.4g} ms a step"
        if self.kind == "over":
            return f"steps are as fast as before: {change}"
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        readings = "".join(f"; {name} {a:.4g} -> {b:.4g}" for name, (a, b) in (self.sensors or {}).items())
        return (
            f"steps take {self.seconds / self.usual - 1:.0%} longer ({change}): {self.phase} of {where}, "
            f"{self.phase_usual * 1e3:.4g} -> {self.phase_seconds * 1e3:.4g} ms{readings}"
        )


class SlowdownDetector:
    """Compares the table of all ranks with the run's own past. Of a process: another one may be on other machines."""

    def __init__(self, *, threshold: float = 0.2) -> None:
        self._threshold = threshold
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
        # The smallest excess to report: the threshold, or what noise of a median of normal values cannot explain
        noise = float(np.median(usual[:, 1] / usual[:, 0])) * 1.25 / math.sqrt(STEPS)
        excess, limit = now / before - 1, max(self._threshold, _NOISE * noise)
        recent = float(np.median(table[:, 2]) / np.median(usual[:, 2])) - 1
        if excess >= _AGAIN * self._reported + limit and recent >= self._threshold:
            news = self._explain(table, usual)
            self._reported = max(excess, news.seconds / news.usual - 1)
            return news
        if self._reported and excess < _BACK * self._threshold:
            self._reported = 0.0
            return Slowdown(kind="over", seconds=now, usual=before)
        return None

    def _explain(self, table: np.ndarray, usual: np.ndarray) -> Slowdown:
        before, now = (float(np.median(figures[:, 2])) for figures in (usual, table))
        phases = slice(3, 3 + len(PHASES))
        rank, phase = self._cause(table[:, phases] - usual[:, phases], now - before)
        ranks = slice(None) if rank is None else slice(rank, rank + 1)
        was, then = np.median(usual[ranks], axis=0), np.median(table[ranks], axis=0)
        readings = {name: (float(was[n]), float(then[n])) for n, name in enumerate(SENSORS, phases.stop)}
        return Slowdown(
            kind="slow",
            seconds=now,
            usual=before,
            phase=PHASES[phase],
            rank=rank,
            phase_seconds=float(then[phases][phase]),
            phase_usual=float(was[phases][phase]),
            sensors={name: both for name, both in readings.items() if not math.isnan(sum(both))},
        )

    def _cause(self, excess: np.ndarray, whole: float) -> tuple[int | None, int]:  # (ranks, phases), of a whole step
        """The rank, or None for all alike, and the number of the phase."""
        working = [number for number in range(len(PHASES)) if number != WAIT]
        own = excess[:, working].sum(axis=1)
        leader = int(own.argmax())
        if own[leader] < _ALONE * whole:
            return None, WAIT
        others = np.delete(own, leader)
        if not len(others) or float(np.median(others)) <= _ALONE * own[leader]:
            return leader, max(working, key=lambda phase: excess[leader, phase])
        return None, max(working, key=lambda phase: float(np.median(excess[:, phase])))


class SpeedMonitor:
    """observe() every step, on all ranks; nobody waits, but for a moment when steps have become slow.

    Figures of all ranks are sent after one step, and read after the next.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, threshold: float) -> None:
        """group: gloo, and of this thread alone: a collective of another one would meet these.

        threshold: 0.2 for 20%; 0: no detection.
        """
        self._group, self._device = group, device
        self._steps, self._medians = 0, Medians()
        self._sent: tuple[dist.Work, list[torch.Tensor]] | None = None
        self._detector = SlowdownDetector(threshold=threshold) if threshold else None

    def observe(self, split: Mapping[str, float], readings: Mapping[str, float]) -> Slowdown | None:
        """What is new, given this rank's seconds of a step by phase, and what its sensors say."""
        if self._detector is None:
            return None
        news = None
        if self._sent:
            (work, rows), self._sent = self._sent, None
            work.wait()
            news = self._detector.observe([row.tolist() for row in rows], self._steps)
        self._steps += 1
        self._medians.add(split, readings)
        if self._steps % EVERY == 0:
            mine = torch.tensor(self._medians.vector(), dtype=torch.float64)
            rows = [torch.empty_like(mine) for _ in range(self._group.size())]
            self._sent = dist.all_gather(rows, mine, group=self._group, async_op=True), rows
        if news and news.kind == "slow" and news.rank is None and news.phase in SHARED:
            return replace(news, rank=slowest(on_all(self._group, lambda: probe(self._device))))
        return news
