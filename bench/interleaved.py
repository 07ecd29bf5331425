"""Interleaved runs of training steps, each in a process of its own, so that none changes how another allocates memory.

After warm-up one process works at a time, on one thread. It reports its own CPU time, which a busy machine disturbs
least, and only ratios within one round are compared. Each round starts with another implementation.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench import baselines
from bench.memory import peak_on_cpu
from fasttrain.metrics.hardware import measured_flops

WARM_UP = 2  # steps: compilation, optimizer state, the heap's final size


class InterleavedRuns:
    """The processes, and what they have measured."""

    def __init__(self, pipes: dict[str, Connection]) -> None:
        self._pipes = pipes
        self.seconds: dict[str, list[float]] = {name: [] for name in pipes}
        self.losses = {name: [loss] for name, (_, loss) in self.ask_all("step").items()}
        self.start = self.ask_all("spent")  # CPU seconds up to the end of the first step
        for _ in range(WARM_UP - 1):
            for name, (_, loss) in self.ask_all("step").items():
                self.losses[name].append(loss)

    def ask(self, name: str, what: str) -> Any:
        self._pipes[name].send(what)
        return self._pipes[name].recv()

    def ask_all(self, what: str, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Ask at the same time: for what is not timed."""
        asked = {name: self._pipes[name] for name in names or self._pipes}
        for pipe in asked.values():
            pipe.send(what)
        return {name: pipe.recv() for name, pipe in asked.items()}

    def take(self, rounds: int) -> None:
        names = list(self._pipes)
        for round in range(rounds):
            first = round % len(names)
            for name in names[first:] + names[:first]:
                seconds, loss = self.ask(name, "step")
                self.seconds[name].append(seconds)
                self.losses[name].append(loss)

    def speed(self, name: str, against: str) -> dict[str, float]:
        """The speed of `name` as a multiple of that of `against`: median, min and max over all rounds."""
        ratios = [b / a for a, b in zip(self.seconds[name], self.seconds[against], strict=True)]
        return {f"x {against}": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


@contextmanager
def interleaved_runs(names: Iterable[str], vocab: int) -> Iterator[InterleavedRuns]:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in names:
        pipes[name], end = spawn.Pipe()
        processes.append(spawn.Process(target=_serve, args=(end, name, vocab), daemon=True))
        processes[-1].start()
    try:
        yield InterleavedRuns(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, name: str, vocab: int) -> None:
    torch.set_num_threads(1)
    step = baselines.STEPS[name](vocab)
    answers = {"step": _timed, "memory": peak_on_cpu, "parts": _parts, "spent": _spent, "peak": _peak_flops}
    while True:
        pipe.send(answers[pipe.recv()](step))


def _timed(step: baselines.Step) -> tuple[float, float]:
    start = time.process_time()
    loss = step()
    return time.process_time() - start, loss


def _spent(_: baselines.Step) -> float:
    """CPU seconds of this process so far, and of the compilers that it has called."""
    return sum(os.times()[:4])


def _peak_flops(_: baselines.Step) -> float:
    """The best FLOP/s of matmuls on this thread."""
    return measured_flops(torch.device("cpu"), torch.float32)


_PARTS = {  # by what the name of an event, or else of the nearest event around it, contains
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "fasttrain::matmul"),
    "attention": ("scaled_dot_product", "fasttrain::attention"),
    "cross-entropy": ("linear_cross_entropy",),
    "fused elementwise": ("CompiledFxGraph",),
    "optimizer": ("Optimizer.step",),
    "clip": ("clip",),
}


def _parts(step: baselines.Step) -> dict[str, float]:
    """Return the shares of a step's time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    spent = dict.fromkeys([*_PARTS, "everything else"], 0.0)
    for event in profile.events():
        spent[_part(event)] += event.self_cpu_time_total
    return {part: microseconds / sum(spent.values()) for part, microseconds in spent.items()}


def _part(event: Any) -> str:
    while event is not None:
        for part, names in _PARTS.items():
            if any(name in event.name for name in names):
                return part
        event = event.cpu_parent
    return "everything else"
