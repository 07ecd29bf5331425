"""A few steps under torch's profiler, `fasttrain train --profile`, and what it leaves. docs/profile.md.

    RUN/profile/trace-rank0-step8.json.gz     every op with its begin and end, for ui.perfetto.dev
    RUN/profile/memory-rank0-step8.pickle     GPU: the allocator's history, for pytorch.org/memory_viz

Every rank profiles, so that none waits for one that is slowed down by it; the main one prints. The first steps of a
process compile and warm up, and are not profiled. Profiling only watches: the numbers of the run stay bitwise the same.

An op's own time is without the ops that it calls. On a CPU it is its duration less that of the events within it, thread
by thread; on a GPU that of the kernels that it launched, which carry its number ("External id").
"""

import gzip
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fasttrain.distributed.runtime import Runtime
from fasttrain.metrics.step_timer import PhaseTimes
from fasttrain.units import plural

TOP = 10  # ops in the table
_STEP = "ProfilerStep#"  # the profiler's own mark around a step: its own time is in no op
_ON_HOST = ("cpu_op", "user_annotation")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_WIDEST = 48  # characters of a name

Events = Sequence[Mapping[str, Any]]  # of a trace


class OpTime(NamedTuple):
    name: str
    seconds: float  # own time, over all steps
    calls: int


def op_lines(events: Events, *, steps: int, on_gpu: bool) -> list[str]:
    """The table: the most expensive ops of a step, and their share of all time."""
    times = gpu_times(events) if on_gpu else host_times(events)
    ops = [op for op in times if op.name != _STEP]
    total = sum(op.seconds for op in times)
    if not total:
        return ["the profiler saw no op"]
    rows = [(op.seconds, _short(op.name), plural(round(op.calls / steps), "call")) for op in ops[:TOP]]
    if rest := ops[TOP:]:
        rows.append((sum(op.seconds for op in rest), f"{len(rest)} other ops", ""))
    rows += [(op.seconds, "no op: Python, waiting", "") for op in times if op.name == _STEP]
    width = max(len(name) for _, name, _ in rows)
    lines = [f"the most expensive ops of a step, by their own time{' on the GPU' if on_gpu else ''}:"]
    for seconds, name, calls in rows:
        lines.append(f"  {seconds / total:6.1%}  {name:<{width}}  {seconds / steps * 1e3:9.2f} ms  {calls}".rstrip())
    return [*lines, f"  the GPU is busy {gpu_busy(events):.1%} of the time"] if on_gpu else lines


def split_line(splits: Sequence[Mapping[str, float]]) -> str:
    """The phases of a step by the run's own timer, and their share; means over steps."""
    parts: Counter[str] = Counter()
    for split in splits:
        parts.update(split)
    total = parts.total()
    shares = "  ".join(f"{name} {seconds / total:.1%}" for name, seconds in parts.items())
    return f"a step takes {total / len(splits) * 1e3:,.1f} ms: {shares}"


def host_times(events: Events) -> list[OpTime]:
    """Own times of all ops on the host, the most expensive first."""
    spent, calls = Counter[str](), Counter[str]()
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    # Of events that began together, the outer ones first.
    for event in sorted((e for e in events if e.get("cat") in _ON_HOST), key=lambda e: (e["ts"], -e["dur"])):
        threads[event["tid"]].append(event)
    for thread in threads.values():
        running: list[tuple[str, float]] = []  # names and ends
        for event in thread:
            name = _STEP if event["name"].startswith(_STEP) else event["name"]
            while running and running[-1][1] <= event["ts"]:
                running.pop()
            if running:
                spent[running[-1][0]] -= event["dur"]
            spent[name] += event["dur"]
            calls[name] += 1
            running.append((name, event["ts"] + event["dur"]))
    return [OpTime(name, microseconds / 1e6, calls[name]) for name, microseconds in spent.most_common()]


def gpu_times(events: Events) -> list[OpTime]:
    """Times of all ops that launched kernels; a kernel that nobody claims goes by its own name."""
    hosts = [event for event in events if event.get("cat") in _ON_HOST and "args" in event]
    ops = {e["args"].get("External id"): e["name"] for e in hosts if not e["name"].startswith(_STEP)}
    spent, calls = Counter[str](), Counter[str]()
    for event in events:
        if event.get("cat") in _ON_GPU:
            name = ops.get(event["args"].get("External id")) or event["name"]
            spent[name] += event["dur"]
            calls[name] += 1
    return [OpTime(name, microseconds / 1e6, calls[name]) for name, microseconds in spent.most_common()]


def gpu_busy(events: Events) -> float:
    """Share of the time, from the first kernel to the end of the last, in which one was running."""
    kernels = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in _ON_GPU)
    if not kernels:
        return 0.0
    busy, end = 0.0, kernels[0][0]
    for begin, last in kernels:
        busy += max(last - max(end, begin), 0.0)
        end = max(end, last)
    return busy / max(end - kernels[0][0], 1e-9)


def _short(name: str) -> str:
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 3]}..."


WARM_UP = 5  # steps of a process before the profiled ones; in the last of them the profiler itself warms up
_HISTORY = 200_000  # allocations and frees of a GPU that are kept


class Profiler(AbstractContextManager["Profiler"]):
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
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
                schedule=schedule(wait=WARM_UP - 1, warmup=1, active=self._steps, repeat=1),
                profile_memory=True,
                record_shapes=True,
            )
            self._profile.start()
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._profile is None:
            return
        with _quiet():
            self._profile.stop()
        if kind is None and self._phases:
            self._report()
        elif kind is None:
            self._on_progress(f"nothing was profiled: the run ended within the {WARM_UP} warm-up steps")

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
        """Write the files; what there is to say about them."""
        last = self._before + len(self._phases)
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._runtime.rank}-step{last}"
        trace, plain = self._directory / f"trace-{name}.json.gz", self._directory / f"trace-{name}.json"
        watched.export_chrome_trace(str(plain))  # not compressed: torch takes 30 times as long
        written = plain.read_bytes()
        trace.write_bytes(gzip.compress(written, compresslevel=1))
        plain.unlink()
        events = json.loads(written)["traceEvents"]
        memory = self._directory / f"memory-{name}.pickle"
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(str(memory))
            torch.cuda.memory._record_memory_history(enabled=None)
        return [
            f"profiled steps {self._before + 1} to {last}",
            split_line([phases.seconds() for phases in self._phases]),
            *op_lines(events, steps=len(self._phases), on_gpu=self._on_gpu),
            f"trace: {trace} (open it at ui.perfetto.dev)",
            *([f"memory: {memory} (open it at pytorch.org/memory_viz)"] if self._on_gpu else []),
        ]


def check(steps: int, *, left: int) -> None:
    """An error if a run with so many steps left does not get past those that are to be profiled."""
    if steps and left < WARM_UP + steps:
        raise ValueError(
            f"log.profile is {steps} and {left} steps are left to do; the first {WARM_UP} of a process are not "
            f"profiled: raise batch.steps, or lower log.profile"
        )


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
