"""The program on the null GPU, with the device's counters read at every step of its optimizer."""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bench.nullgpu.__main__ import options

FIRST = 5  # steps that compile and warm up, and are not counted where there are more
_SIZE = 1 << 22


class Device:
    """The counters of the null GPU."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnullgpu.so")
        self._text = ctypes.create_string_buffer(_SIZE)

    def counters(self) -> dict[str, int]:
        length = self._library.nullgpu_json(self._text, ctypes.c_size_t(_SIZE))
        return json.loads(self._text.raw[:length])

    def trace(self, descriptor: int) -> None:
        """Python stacks of all waits from now on; -1: no more."""
        self._library.nullgpu_trace(descriptor)


@dataclass
class Steps:
    """What the host did between two calls of the first optimizer's step."""

    device: Device
    waits: Any = None  # a file for stacks, or None
    seconds: list[float] = field(default_factory=list)  # CPU, of all threads
    counts: list[dict[str, int]] = field(default_factory=list)
    allocated: int = 0
    reserved: int = 0
    _optimizer: object = None
    _captured: bool = False
    _before: tuple[float, dict[str, int]] | None = None

    def end(self, optimizer: object, *_: object) -> None:
        """The hook: several optimizers may share a step."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._captured = True  # from now on, a replay is a step
            return
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        now = time.process_time(), self.device.counters()
        if self._before:
            self.seconds.append(now[0] - self._before[0])
            self.counts.append({name: value - self._before[1].get(name, 0) for name, value in now[1].items()})
        if self.waits and len(self.seconds) == FIRST:
            self.device.trace(self.waits.fileno())
        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        counters = self.device.counters()  # 0.2 ms, which are not the program's
        self._before = time.process_time(), counters

    def end_with_replays(self) -> None:
        """Where an optimizer's step has been captured, no hook of it is called again."""
        replay = torch.cuda.CUDAGraph.replay

        def replay_and_end(graph: torch.cuda.CUDAGraph) -> None:
            replay(graph)
            if self._captured:
                self.end(self._optimizer)

        torch.cuda.CUDAGraph.replay = replay_and_end  # type: ignore[method-assign, assignment]

    def median(self, name: str) -> float:
        return statistics.median(count.get(name, 0) for count in self._warm(self.counts))

    def _warm(self, values: list[Any]) -> list[Any]:
        return values[FIRST:] or values

    def lines(self) -> Iterator[str]:
        if not self.seconds:
            yield "the program made fewer than two steps"
            return
        warm = self._warm(self.seconds)
        yield f"{len(self.seconds)} steps; of the median one after the first {FIRST}:"
        spread = f"{min(warm) * 1e3:.1f} - {max(warm) * 1e3:.1f}"
        yield f"  {'host CPU, ms':<24} {statistics.median(warm) * 1e3:10.1f}  ({spread})"
        names = sorted({name for count in self._warm(self.counts) for name, n in count.items() if n})
        for name in names:
            if not name.startswith(("kernel", "stub:")) and name not in ("used", "peak"):
                yield f"  {name:<24} {self.median(name):10,.0f}"
        for name in sorted((n for n in names if n.startswith("kernel")), key=lambda n: -self.median(n))[:40]:
            yield f"  {self.median(name):10,.0f}  {name[:100]}"
        yield f"allocated {self.allocated / 2**30:.2f} GiB, reserved {self.reserved / 2**30:.2f} GiB at most"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.nullgpu.program")
    options(parser)
    asked = parser.parse_args()
    rank = int(os.environ.get("RANK", 0))
    stacks = tempfile.TemporaryFile("w+") if asked.waits else None  # noqa: SIM115  (until the process ends)
    steps = Steps(Device(), waits=stacks)
    register_optimizer_step_post_hook(steps.end)
    steps.end_with_replays()
    path = asked.json and asked.json.with_name(asked.json.name + (f".{rank}" if rank else ""))
    atexit.register(_report, steps, path, printed=rank == 0)
    _run(["-m", *asked.m] if asked.m else asked.program)


def _run(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


def _report(steps: Steps, path: Path | None, *, printed: bool) -> None:
    steps.device.trace(-1)
    if printed:
        print("\n".join(steps.lines()), file=sys.stderr)
    if printed and steps.waits:
        steps.waits.seek(0)
        print("waits:", steps.waits.read(), sep="\n", file=sys.stderr)
    if path:
        figures = {"seconds": steps.seconds, "counts": steps.counts}
        path.write_text(json.dumps(figures | {"allocated": steps.allocated, "reserved": steps.reserved}))


if __name__ == "__main__":
    main()
