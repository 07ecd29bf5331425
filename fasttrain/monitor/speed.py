"""Slow-downs of a run: every rank's own split, exchanged every few steps, judged alike by all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from fasttrain.monitor.exchange import EVERY, Exchange, Medians, probe, slowest
from fasttrain.monitor.slowdown import Slowdown, SlowdownDetector

PHASES = ("data", "wait", "forward", "backward", "optimizer", "record", "checkpoint")  # that may become slow
SENSORS = ("sm_clock", "temperature", "power", "throttled_power", "throttled_heat", "throttled_hardware")
SHARED = ("forward", "backward", "optimizer")  # parts with collectives in them, where ranks keep pace with the slowest


class SpeedMonitor:
    """observe() every step, on all ranks; nobody waits, but for a moment when steps have become slow."""

    def __init__(
        self,
        group: dist.ProcessGroup,  # gloo, and nobody else's
        device: torch.device,
        *,
        threshold: float,  # 0.2 for 20%; 0: nothing is judged
    ) -> None:
        self._group, self._device = group, device
        self._steps = 0
        self._medians, self._exchange = Medians(PHASES, SENSORS), Exchange(group)
        self._detector = SlowdownDetector(PHASES, SENSORS, threshold=threshold) if threshold else None

    def observe(self, split: Mapping[str, float], readings: Mapping[str, float]) -> Slowdown | None:
        """What is new, given this rank's seconds of a step by part, and what its sensors say."""
        if self._detector is None:
            return None
        self._steps += 1
        rows = self._exchange.read()
        news = None if rows is None else self._detector.observe(rows, self._steps - 1)
        self._medians.add(split, readings)
        if self._steps % EVERY == 0:
            self._exchange.send(self._medians.vector())
        if news and news.kind == "slow" and news.rank is None and news.part in SHARED:
            return replace(news, rank=self._slow_rank())
        return news

    def _slow_rank(self) -> int | None:
        """Equal work, alone: who takes longer?"""
        mine = torch.tensor([probe(self._device)], dtype=torch.float64)
        times = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(times, mine, group=self._group)
        return slowest([float(time) for time in times])
