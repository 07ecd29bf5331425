"""What a trace says of a CPU's memory: bytes over time, the peak, and which ops allocated what is alive then.

Bytes are those since the profiled steps began: weights, and what else was there before, is not in a trace.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

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
