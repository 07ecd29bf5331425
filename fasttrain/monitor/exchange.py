"""What ranks tell each other about their speed: one small vector every few steps, without waiting for it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from fasttrain.monitor.window import Window

STEPS = 40  # of the median that says whether steps are slow
RECENT = 16  # and of those that say why: by the time that most of the 40 are slow, all of these are
EVERY = 10  # steps between two exchanges


class Medians:
    """One rank's own figures: the parts of its last steps, and what its sensors say."""

    def __init__(self, parts: Sequence[str], sensors: Sequence[str] = ()) -> None:
        self._parts, self._sensors = tuple(parts), tuple(sensors)
        self._steps: deque[list[float]] = deque(maxlen=STEPS)
        self._readings: Mapping[str, float] = {}

    def add(self, split: Mapping[str, float], readings: Mapping[str, float] | None = None) -> None:
        """The seconds of a step by part; parts that a step did not have took none."""
        self._steps.append([split.get(part, 0.0) for part in self._parts])
        self._readings = readings or {}

    def vector(self) -> list[float]:
        """To be exchanged: median and spread of whole steps; of recent ones the median, whole and by part; sensors."""
        table = np.array(self._steps)  # (steps, parts)
        whole = table.sum(axis=1)
        steps = Window(STEPS, whole.tolist())
        recent = np.median(np.column_stack([whole, table])[-RECENT:], axis=0)
        readings = [self._readings.get(name, math.nan) for name in self._sensors]
        return [steps.median, steps.spread, *recent.tolist(), *readings]


class Exchange:
    """Vectors of all ranks, without waiting for them: sent after one step, read after the next.

    group: gloo, and of this thread alone; a collective of another thread in it would meet these.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._work: dist.Work | None = None
        self._rows: list[torch.Tensor] = []

    def send(self, vector: Sequence[float]) -> None:
        """On every rank, after the same step."""
        mine = torch.tensor(vector, dtype=torch.float64)
        self._rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._work = dist.all_gather(self._rows, mine, group=self._group, async_op=True)

    def read(self) -> list[list[float]] | None:
        """One row for each rank; None if nothing was sent since the last reading."""
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        return [row.tolist() for row in self._rows]


def probe(device: torch.device, rows: int = 512, repeats: int = 10) -> float:
    """Seconds of a matrix product on this rank alone, the mean of several. Waits for the device.

    Ranks keep pace with the slowest wherever a part of the step has collectives in it, and then all of them look slow.
    Equal work that none shares with another tells them apart. The fastest product would not: a rank that gets its
    processor for 5 ms in 50 does one of 3 ms at full speed.
    """
    a = torch.ones(rows, rows, device=device)
    times = [_product(a) for _ in range(repeats + 1)]
    return sum(times[1:]) / repeats  # the first one warms up


def slowest(seconds: Sequence[float], margin: float = 0.15) -> int | None:
    """The rank that took longer for equal work than the others did, by `margin` or more; None: no one."""
    rank = max(range(len(seconds)), key=lambda r: seconds[r])
    others = [s for r, s in enumerate(seconds) if r != rank]
    return rank if others and seconds[rank] >= (1 + margin) * median(others) else None


def _product(a: torch.Tensor) -> float:
    _finish(a.device)
    start = perf_counter()
    torch.mm(a, a)
    _finish(a.device)
    return perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
