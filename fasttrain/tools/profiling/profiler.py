"""A few steps under torch's profiler, and what it leaves:

    RUN/profile/trace-rank0-step8.json.gz     every op with its begin and end, for ui.perfetto.dev
    RUN/profile/memory-rank0-step8.pickle     GPU: the allocator's history, for pytorch.org/memory_viz
    RUN/profile/memory-rank0-step8.json       CPU: allocated bytes over time, and what is alive at the peak

Every rank profiles, so that none waits for one that is slowed down by it; the first one prints. The first steps of a
process compile and warm up, and are left alone. Profiling watches: the numbers of the run stay bitwise the same.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fasttrain.distributed.runtime import Runtime
from fasttrain.metrics import PhaseTimes
from fasttrain.tools.profiling.memory import memory_of
from fasttrain.tools.profiling.ops import op_lines, split_line

WARM_UP = 5  # steps of a process before the profiled ones; in the last of them the profiler itself warms up
_HISTORY = 200_000  # allocations and frees of a GPU that are kept


class Profiler:
    """Use as a context; begin_step() at the start of every step. With steps=0 it does nothing."""

    def __init__(
        self,
        directory: Path,
        runtime: Runtime,
        *,
        steps: int,  # to profile
        completed: int,  # steps of the run before this process
        on_progress: Callable[[str], None],
    ) -> None:
        self._directory, self._runtime, self._steps, self._on_progress = directory, runtime, steps, on_progress
        self._before = completed + WARM_UP
        self._on_gpu = runtime.device.type == "cuda"
        self._begun = 0  # steps, in this process
        self._phases: list[PhaseTimes] = []  # of the profiled ones
        self._profile: profile | None = None  # None: it has not begun, or is done

    def begin_step(self) -> bool:
        """Whether something was done that is not the step's work."""
        if not self._steps or self._begun > WARM_UP + self._steps:
            return False
        self._begun += 1
        if self._begun == 1:
            self._profile = self._started()
            return True
        if self._begun == WARM_UP + 1 and self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY, stacks="python")
        assert self._profile is not None
        with _quiet():
            self._profile.step()
        if self._begun > WARM_UP + self._steps:
            self._report()
        return True

    def end_step(self, phases: PhaseTimes) -> None:
        """Take the phases of the step that has just ended."""
        if self._profile is not None and self._begun > WARM_UP:
            self._phases.append(phases)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._profile is None:
            return
        with _quiet():
            self._profile.stop()
        if kind is None and self._phases:
            self._report()
        elif kind is None:
            self._on_progress(f"nothing was profiled: the run ended within the {WARM_UP} steps that are left alone")

    def _started(self) -> profile:
        made = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=schedule(wait=WARM_UP - 1, warmup=1, active=self._steps, repeat=1),
            profile_memory=True,
            record_shapes=True,
        )
        made.start()
        return made

    def _report(self) -> None:
        assert self._profile is not None
        watched, self._profile = self._profile, None
        try:
            lines = self._written(watched)
        except (OSError, RuntimeError) as error:  # a full disk; no profile is worth a run
            lines = [f"the profile could not be written: {error}"]
        for line in lines:
            self._on_progress(line)

    def _written(self, watched: profile) -> list[str]:
        """The files are; what there is to say about them."""
        last = self._before + len(self._phases)
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._runtime.rank}-step{last}"
        trace, memory = self._directory / f"trace-{name}.json.gz", self._directory / f"memory-{name}.json"
        events = _exported(watched, trace)
        if self._on_gpu:
            memory = memory.with_suffix(".pickle")
            torch.cuda.memory._dump_snapshot(str(memory))
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            memory.write_text(json.dumps(memory_of(events)))
        return [
            f"profiled steps {self._before + 1} to {last}",
            split_line([phases.seconds() for phases in self._phases]),
            *op_lines(events, steps=len(self._phases), on_gpu=self._on_gpu),
            f"trace: {trace} (open it at ui.perfetto.dev)",
            f"memory: {memory}{' (open it at pytorch.org/memory_viz)' if self._on_gpu else ''}",
        ]


def check(steps: int, *, left: int) -> None:
    """An error if a run with so many steps left does not get past those that are to be profiled."""
    if steps and left < WARM_UP + steps:
        raise ValueError(
            f"log.profile is {steps} and {left} steps are left to do; the first {WARM_UP} of a process are left alone: "
            f"raise batch.steps, or lower log.profile"
        )


def _exported(watched: profile, path: Path) -> list[dict[str, Any]]:
    """The trace is written; its events."""
    plain = path.with_suffix("")  # torch compresses it too, in 30 times the time
    watched.export_chrome_trace(str(plain))
    written = plain.read_bytes()
    path.write_bytes(gzip.compress(written, compresslevel=1))
    plain.unlink()
    return json.loads(written)["traceEvents"]


@contextmanager
def _quiet() -> Iterator[None]:
    """Kineto says on stderr when it starts and stops, at every log level: that would go right into the live view."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
