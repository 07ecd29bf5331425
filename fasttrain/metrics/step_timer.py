"""Where the time of a step goes: marks, and the seconds between them.

    timer = StepTimer(device)
    for step in ...:
        for micro in ...:
            micro = next(batches);  timer.mark("data")
            backward(micro);        timer.mark("forward_backward")
        optimizer.step();           timer.mark("optimizer")
        phases = timer.end_step()
        phases.seconds()  # {"data": 0.002, "forward_backward": 0.271, "optimizer": 0.018}

A mark closes the interval since the mark before it. So the phases of all steps add up to all of the time, and what
happens after the last mark of a step belongs to the first phase of the next.

On a GPU a mark is an event in the stream, and its time is when the GPU gets there: a phase is how long it keeps the
GPU, and what the host does meanwhile costs nothing. Nobody waits for a mark; whoever asks for the seconds of a step
waits for its end, so a loop asks for those of the step before.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch

Instant = float | torch.cuda.Event


class PhaseTimes(NamedTuple):
    """The marks of one step."""

    names: Sequence[str]
    instants: Sequence[Instant]  # one more; phase i lies between instants i and i + 1

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, in the order of first marks; marks of the same name add up. Waits for a GPU."""
        phases: dict[str, float] = {}
        if isinstance(end := self.instants[-1], torch.cuda.Event):
            end.synchronize()
        for name, (before, after) in zip(self.names, pairwise(self.instants), strict=True):
            phases[name] = phases.get(name, 0.0) + _between(before, after)
        return phases


class StepTimer:
    """Runs from the moment that it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] = []
        self._instants: list[Instant] = [self._now()]

    def mark(self, name: str) -> None:
        """The time since the last mark was `name`'s. Work that is captured has no marks, for it has no time."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self._names.append(name)
        self._instants.append(self._now())

    def end_step(self) -> PhaseTimes:
        """The step ends with its last mark, and the next begins there."""
        phases = PhaseTimes(self._names, self._instants)
        self._names, self._instants = [], [self._instants[-1]]
        return phases

    def _now(self) -> Instant:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(before: Any, after: Any) -> float:
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1000  # milliseconds


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of some work outside of the loop. Waits for a GPU."""
    timer = StepTimer(device)
    work()
    if device.type == "mps":
        torch.mps.synchronize()
    timer.mark("work")
    return timer.end_step().seconds()["work"]
