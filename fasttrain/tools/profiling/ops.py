"""Which ops the time of a trace goes to, by their own time: without the ops that they call.

On a CPU an op's own time is its duration less that of the events within it, thread by thread. On a GPU it is that of
the kernels that it launched, which carry its number ("External id").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
    """The parts of a step by the run's own stopwatch, and their share; means over steps."""
    parts: dict[str, float] = defaultdict(float)
    for split in splits:
        for name, seconds in split.items():
            parts[name] += seconds / len(splits)
    total = sum(parts.values())
    shares = "  ".join(f"{name} {seconds / total:.1%}" for name, seconds in parts.items())
    return f"a step takes {total * 1e3:,.1f} ms: {shares}"


def host_times(events: Iterable[Mapping[str, Any]]) -> list[OpTime]:
    """Of all ops on the host, the most expensive first."""
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
    """Of all ops that launched kernels; a kernel that nobody claims goes by its own name."""
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
