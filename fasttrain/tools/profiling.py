"""A few steps under torch's profiler, `fasttrain train --profile`, and what it leaves. docs/profile.md.

    RUN/profile/trace-rank0-step8.json.gz     every op with its begin and end, for ui.perfetto.dev
    RUN/profile/memory-rank0-step8.pickle     GPU: the allocator's history, for pytorch.org/memory_viz
    RUN/profile/memory-rank0-step8.json       CPU: allocated bytes over time, and what is alive at the peak

Every rank profiles, so that none waits for one that is slowed down by it; the main one prints. The first steps of a
process compile and warm up, and are not profiled. Profiling only watches: the numbers of the run stay bitwise the same.

An op's own time is without the ops that it calls. On a CPU it is its duration less that of the events within it, thread
by thread; on a GPU that of the kernels that it launched, which carry its number ("External id"). Bytes are those since
the profiled steps began: weights, and what else was there before, are not in a trace.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fasttrain.distributed.runtime import Runtime
from fasttrain.metrics import PhaseTimes

TOP = 10  # ops in the table
_STEP = "ProfilerStep#"  # the profiler's own mark around a step: its own time is in no op
_ON_HOST = ("cpu_op", "user_annotation")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_WIDEST = 48  # characters of a name


class OpTime(NamedTuple):
    name: str
    seconds: float  # own time, over all steps
    calls: int


def op_lines(events: Iterable[Mapping[str, Any]], *, steps: int, on_gpu: bool) -> list[str]:
    """The table: the most expensive ops of a step, and their share of all time."""
    events = list(events)
    times = gpu_times(events) if on_gpu else host_times(events)
    ops = [op for op in times if op.name != _STEP]
    outside = sum(op.seconds for op in times if op.name == _STEP)
    total = sum(op.seconds for op in times)
    if not total:
        return ["the profiler saw no op"]
    rows = [(op.seconds, _short(op.name), _calls(op.calls / steps)) for op in ops[:TOP]]
    if rest := ops[TOP:]:
        rows.append((sum(op.seconds for op in rest), f"{len(rest)} other ops", ""))
    if outside:
        rows.append((outside, "no op: Python, waiting", ""))
    width = max(len(name) for _, name, _ in rows)
    head = f"the most expensive ops of a step, by their own time{' on the GPU' if on_gpu else ''}:"
    lines = [
        f"  {seconds / total:6.1%}  {name:<{width}}  {seconds / steps * 1e3:9.2f} ms  {calls}".rstrip()
        for seconds, name, calls in rows
    ]
    return [head, *lines, *([f"  the GPU is busy {gpu_busy(events):.1%} of the time"] if on_gpu else [])]


def split_line(splits: Sequence[Mapping[str, float]]) -> str:
    """The phases of a step by the run's own timer, and their share; means over steps."""
    parts: dict[str, float] = defaultdict(float)
    for split in splits:
        for name, seconds in split.items():
            parts[name] += seconds / len(splits)
    total = sum(parts.values())
    shares = "  ".join(f"{name} {seconds / total:.1%}" for name, seconds in parts.items())
    return f"a step takes {total * 1e3:,.1f} ms: {shares}"


def host_times(events: Iterable[Mapping[str, Any]]) -> list[OpTime]:
    """Own times of all ops on the host, the most expensive first."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _ON_HOST:
            threads[event["tid"]].append(event)
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for thread in threads.values():
        running: list[tuple[str, float]] = []  # names and ends
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            name = _STEP if event["name"].startswith(_STEP) else event["name"]
            while running and running[-1][1] <= event["ts"]:
                running.pop()
            if running:
                spent[running[-1][0]][0] -= event["dur"]
            spent[name][0] += event["dur"]
            spent[name][1] += 1
            running.append((name, event["ts"] + event["dur"]))
    return _ranked(spent)


def gpu_times(events: Iterable[Mapping[str, Any]]) -> list[OpTime]:
    """Times of all ops that launched kernels; a kernel that nobody claims goes by its own name."""
    events = list(events)
    number = {e["args"].get("External id"): e["name"] for e in events if e.get("cat") in _ON_HOST and "args" in e}
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        if event.get("cat") in _ON_GPU:
            name = number.get(event["args"].get("External id"), event["name"])
            spent[event["name"] if name.startswith(_STEP) else name][0] += event["dur"]
            spent[event["name"] if name.startswith(_STEP) else name][1] += 1
    return _ranked(spent)


def gpu_busy(events: Iterable[Mapping[str, Any]]) -> float:
    """Share of the time, from the first kernel to the end of the last, in which one was running."""
    busy, begin, end = 0.0, None, 0.0
    for event in sorted((e for e in events if e.get("cat") in _ON_GPU), key=lambda e: e["ts"]):
        if begin is None:
            begin = end = event["ts"]
        busy += max(event["ts"] + event["dur"] - max(end, event["ts"]), 0.0)
        end = max(end, event["ts"] + event["dur"])
    return busy / (end - begin) if begin is not None and end > begin else 0.0


def _ranked(spent: Mapping[str, list[float]]) -> list[OpTime]:
    times = [OpTime(name, microseconds / 1e6, int(calls)) for name, (microseconds, calls) in spent.items()]
    return sorted(times, key=lambda op: -op.seconds)


def _calls(number: float) -> str:
    return f"{number:,.0f} call{'s' * (round(number) != 1)}"


def _short(name: str) -> str:
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 3]}..."


_FINISHED = 500  # ops that may have begun and ended within the one that allocates


def memory_of(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """For RUN/profile/memory-*.json; times in microseconds."""
    events = list(events)
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    threads = _Threads(events)
    alive: dict[int, tuple[str, int]] = {}
    order: list[tuple[int, str, int]] = []  # address, op, bytes; negative: freed
    timeline: list[tuple[float, int]] = []
    now = peak = at_peak = 0
    for change in changes:
        size, address = change["args"]["Bytes"], change["args"]["Addr"]
        now += size
        timeline.append((round(change["ts"] - changes[0]["ts"], 1), now))
        order.append((address, threads.op_at(change["tid"], change["ts"]) if size > 0 else "", size))
        if now > peak:
            peak, at_peak = now, len(order)
    for address, op, size in order[:at_peak]:  # once more, up to the peak
        if size > 0:
            alive[address] = (op, size)
        else:
            alive.pop(address, None)
    by_op: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for op, size in alive.values():
        by_op[op][0] += size
        by_op[op][1] += 1
    ranked = sorted(by_op.items(), key=lambda item: -item[1][0])
    return {
        "peak_bytes": peak,
        "alive_at_peak": [{"op": op, "bytes": size, "tensors": count} for op, (size, count) in ranked],
        "timeline": timeline,
    }


class _Threads:
    """The ops of a trace, by thread and start."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._ops: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "cpu_op":
                self._ops[event["tid"]].append(event)
        for ops in self._ops.values():
            ops.sort(key=lambda op: op["ts"])
        self._starts = {thread: [op["ts"] for op in ops] for thread, ops in self._ops.items()}

    def op_at(self, thread: Any, time: float) -> str:
        """The innermost op that was running."""
        end = bisect_right(self._starts.get(thread, []), time)
        for op in reversed(self._ops[thread][max(end - _FINISHED, 0) : end]):
            if op["ts"] + op["dur"] >= time:
                return op["name"]
        return "no op"


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
            self._on_progress(f"nothing was profiled: the run ended within the {WARM_UP} warm-up steps")

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
        """Write the files; what there is to say about them."""
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
            f"log.profile is {steps} and {left} steps are left to do; the first {WARM_UP} of a process are not "
            f"profiled: raise batch.steps, or lower log.profile"
        )


def _exported(watched: profile, path: Path) -> list[dict[str, Any]]:
    """Write the trace; its events."""
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
