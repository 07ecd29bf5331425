"""Timing of interleaved runs: what disturbs the machine disturbs all implementations alike.

On a CPU it is the CPU time of this process, on one thread, of as many calls as make a measurable time. On a GPU it is
the time between two CUDA events around one call, with an L2 cache that holds nothing of the call before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

Run = Callable[[], Any]
Seconds = dict[str, list[float]]  # of one call, by implementation
ROUNDS = {"cpu": 7, "cuda": 50}
MIN_SECONDS = 0.02  # of a CPU measurement; process_time itself costs a microsecond
LONG_SECONDS = 0.2  # calls that take longer get fewer rounds
LONG_ROUNDS = 3


def measure(runs: dict[str, Run], device: str) -> Seconds:
    """Time runs that have been called before: nothing is compiled or loaded here."""
    return measure_on_gpu(runs, ROUNDS["cuda"]) if device == "cuda" else measure_on_cpu(runs, ROUNDS["cpu"])


def measure_on_cpu(runs: dict[str, Run], rounds: int) -> Seconds:
    calls, slowest = {}, 0.0
    for name, run in runs.items():
        once = _cpu_seconds(run, 1)
        calls[name] = max(1, round(MIN_SECONDS / once)) if once > 0 else 1000
        slowest = max(slowest, once)
    seconds: Seconds = {name: [] for name in runs}
    for name in interleaved(list(runs), LONG_ROUNDS if slowest > LONG_SECONDS else rounds):
        seconds[name].append(_cpu_seconds(runs[name], calls[name]) / calls[name])
    return seconds


def _cpu_seconds(run: Run, calls: int) -> float:
    begin = time.process_time()
    for _ in range(calls):
        run()
    return time.process_time() - begin


def measure_on_gpu(runs: dict[str, Run], rounds: int, device: str = "cuda") -> Seconds:
    """Wait for the device once, at the end: launches are queued while the cache is being cleared."""
    cache = torch.empty(flush_bytes(torch.cuda.get_device_properties().L2_cache_size), dtype=torch.int8, device=device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for name in interleaved(list(runs), rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        begin.record()
        runs[name]()
        end.record()
        events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) / 1e3 for a, b in pairs] for name, pairs in events.items()}  # from milliseconds


def flush_bytes(l2: int) -> int:
    """Twice the cache, so that nothing survives its way of replacing lines; 256 MB where its size is unknown."""
    return 2 * l2 if l2 > 0 else 256 << 20


def interleaved(names: list[str], rounds: int) -> Iterator[str]:
    """Yield all names each round, starting with another one."""
    for round in range(rounds):
        first = round % len(names)
        yield from names[first:] + names[:first]


class Replay:
    """A clock for pytest-benchmark that gives it seconds which were measured before: begin, end, begin, end, ..."""

    def __init__(self) -> None:
        self._left: list[float] = []
        self._now = 0.0
        self._begun = False

    def load(self, seconds: list[float]) -> None:
        self._left, self._now, self._begun = list(seconds), 0.0, False

    def __call__(self) -> float:
        if self._begun:
            self._now += self._left.pop(0)
        self._begun = not self._begun
        return self._now
