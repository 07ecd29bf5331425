"""Where the time and the memory of a few steps go: `fasttrain train --profile`. docs/profile.md explains the files.

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
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from fasttrain.metrics import Lap
from fasttrain.runtime import Runtime

WARM_UP = 5  # steps of a process before the profiled ones; in the last of them the profiler itself warms up
TOP = 10  # ops in the table
_HISTORY = 200_000  # allocations and frees of a GPU that are kept
_STEP = "ProfilerStep"  # the profiler's own mark, around each step


class OpTime(NamedTuple):
    """What an op took by itself, without the ops that it calls, over all profiled steps."""

    name: str
    seconds: float
    calls: int


class _Averaged(Protocol):
    """As torch.profiler gives them: an op, or a kernel on a device."""

    key: str
    count: int
    device_type: DeviceType
    self_cpu_time_total: float  # microseconds
    self_device_time_total: float


class Profiler:
    """Use as a context; begin_step() at the start of every step. With steps=0 it does nothing."""

    def __init__(
        self,
        directory: Path,
        runtime: Runtime,
        *,
        steps: int,  # to profile
        first: int,  # step of this process, from 0
        tell: Callable[[str], None],
    ) -> None:
        self._directory, self._runtime, self._steps, self._tell = directory, runtime, steps, tell
        self._first = first + WARM_UP
        self._laps: list[Lap] = []
        self._begun = 0  # steps, in this process
        self._ready = False
        self._profile: profile | None = None

    def begin_step(self) -> bool:
        """Whether it took time that is not the step's."""
        if not self._steps:
            return False
        self._begun += 1
        if self._profile is None:
            if self._begun > 1:
                return False  # it is done
            self._profile = self._started()
            return True
        if self._begun == WARM_UP + 1 and self._runtime.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY, stacks="python")
        with _quiet():
            self._profile.step()
        if self._ready:
            self._finish()
        return self._begun > WARM_UP

    def lap(self, lap: Lap) -> None:
        """The split of the step that has just ended."""
        if self._profile is not None and self._begun > WARM_UP:
            self._laps.append(lap)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._profile is None:
            return
        with _quiet():
            self._profile.stop()
        if kind is None and self._laps:
            self._finish()
        elif kind is None:
            self._tell(f"nothing was profiled: the run ended within the {WARM_UP} steps that are left alone")

    def _started(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._runtime.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        made = profile(
            activities=activities,
            schedule=schedule(wait=WARM_UP - 1, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=self._note_ready,
            profile_memory=True,
            record_shapes=True,
            acc_events=True,  # otherwise it drops them with a warning
        )
        made.start()
        return made

    def _note_ready(self, _: profile) -> None:
        self._ready = True

    def _finish(self) -> None:
        assert self._profile is not None
        watched, self._profile = self._profile, None
        last = self._first + len(self._laps)  # counted from 1
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._runtime.rank}-step{last}"
        trace = self._directory / f"trace-{name}.json.gz"
        watched.export_chrome_trace(str(trace))
        memory = self._directory / f"memory-{name}.json"
        if self._runtime.device.type == "cuda":
            memory = memory.with_suffix(".pickle")
            torch.cuda.memory._dump_snapshot(str(memory))
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            with gzip.open(trace) as file:
                memory.write_text(json.dumps(memory_of(json.load(file)["traceEvents"])))
        on_gpu = self._runtime.device.type == "cuda"
        for line in [
            f"profiled steps {self._first + 1} to {last}",
            *split_lines([lap.seconds() for lap in self._laps]),
            *table_lines(*op_times(watched.key_averages(), on_gpu=on_gpu), steps=len(self._laps), on_gpu=on_gpu),
            f"trace: {trace} (open it at ui.perfetto.dev)",
            f"memory: {memory}{' (open it at pytorch.org/memory_viz)' if on_gpu else ''}",
        ]:
            self._tell(line)


def check(steps: int, *, left: int) -> None:
    """An error if a run with so many steps left does not get to those that are to be profiled."""
    if steps and left < WARM_UP + steps:
        raise ValueError(
            f"log.profile is {steps} and {left} steps are left to do; the first {WARM_UP} of a process are left alone: "
            f"raise batch.steps to have {WARM_UP + steps}, or lower log.profile"
        )


def op_times(averages: Iterable[_Averaged], *, on_gpu: bool) -> tuple[list[OpTime], float]:
    """Ops by their own time, the most expensive first; and the seconds in which no op ran, on a CPU."""
    ops, outside = [], 0.0
    for average in averages:
        if average.device_type != DeviceType.CPU:  # a kernel, which the op that launched it has already
            continue
        seconds = (average.self_device_time_total if on_gpu else average.self_cpu_time_total) / 1e6
        if not average.key.startswith(_STEP):
            ops.append(OpTime(average.key, seconds, average.count))
        elif not on_gpu:
            outside += seconds
    return sorted(ops, key=lambda op: -op.seconds), outside


def table_lines(ops: list[OpTime], outside: float, *, steps: int, on_gpu: bool) -> list[str]:
    """The most expensive ops with their share of all time."""
    ops = [op for op in ops if op.seconds > 0]
    total = sum(op.seconds for op in ops) + outside
    if not total:
        return ["the profiler saw no op"]
    rest = ops[TOP:]
    rows = [(op.seconds, op.name, f"{op.calls / steps:,.0f} calls") for op in ops[:TOP]]
    if rest:
        rows.append((sum(op.seconds for op in rest), f"{len(rest)} other ops", ""))
    if outside:
        rows.append((outside, "no op: Python, waiting", ""))
    width = max(len(_short(name)) for _, name, _ in rows)
    head = f"the {min(TOP, len(ops))} most expensive ops, by their own time{' on the GPU' if on_gpu else ''}, of a step:"
    return [head] + [
        f"  {seconds / total:6.1%}  {_short(name):<{width}}  {seconds / steps * 1e3:9.2f} ms  {calls}".rstrip()
        for seconds, name, calls in rows
    ]


def split_lines(splits: list[Mapping[str, float]]) -> list[str]:
    """Parts of a step, and their share; a mean over steps."""
    parts: dict[str, float] = defaultdict(float)
    for split in splits:
        for name, seconds in split.items():
            parts[name] += seconds / len(splits)
    total = sum(parts.values())
    shares = "  ".join(f"{name} {seconds / total:.1%}" for name, seconds in parts.items())
    return [f"a step takes {total * 1e3:,.1f} ms: {shares}"]


def memory_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a trace says of memory: bytes over time, the peak, and which ops allocated what is alive then.

    Bytes are those since the first profiled step began: what was there before does not show in a trace.
    """
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    ops_of: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            ops_of[event["tid"]].append(event)
    for ops in ops_of.values():
        ops.sort(key=lambda op: op["ts"])
    starts = {thread: [op["ts"] for op in ops] for thread, ops in ops_of.items()}
    alive: dict[int, tuple[str, int]] = {}
    at_peak: dict[int, tuple[str, int]] = {}
    now = peak = 0
    timeline: list[tuple[float, int]] = []
    for change in changes:
        size, address, thread = change["args"]["Bytes"], change["args"]["Addr"], change["tid"]
        now += size
        timeline.append((round(change["ts"] - changes[0]["ts"], 1), now))
        if size > 0:
            alive[address] = (_innermost(change["ts"], ops_of[thread], starts.get(thread, [])), size)
        else:
            alive.pop(address, None)
        if now > peak:
            peak, at_peak = now, dict(alive)
    by_op: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for op, size in at_peak.values():
        by_op[op][0] += size
        by_op[op][1] += 1
    ranked = sorted(by_op.items(), key=lambda item: -item[1][0])
    return {
        "peak_bytes": peak,
        "alive_at_peak": [{"op": op, "bytes": size, "tensors": count} for op, (size, count) in ranked],
        "timeline_us_bytes": timeline,
    }


def _innermost(time: float, ops: list[dict[str, Any]], starts: list[float]) -> str:
    """The op that was running, of one thread's, in the order of their starts."""
    for op in reversed(ops[max(bisect_right(starts, time) - _NESTED, 0) : bisect_right(starts, time)]):
        if op["ts"] + op["dur"] >= time:
            return op["name"]
    return "no op"


_NESTED = 200  # ops that may have begun and ended within the one that allocates


def _short(name: str) -> str:
    return name if len(name) <= 48 else f"{name[:45]}..."


@contextmanager
def _quiet() -> Iterator[None]:
    """Kineto writes a line with the time to stderr at each start and stop, whatever its log level: into the live view."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
