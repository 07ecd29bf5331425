"""What can happen in a run: the kinds of events with their severity, and the exit codes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any


class ExitCode(IntEnum):
    """How `python -m fasttrain.train` ends; docs/events.md explains it. 128 + n: it saved and ended by signal n."""

    FINISHED = 0
    ERROR = 1  # of the program, with a traceback
    USER_ERROR = 2
    STOPPED = 3  # by the monitor, or the loss is not finite
    NOT_SAVED = 4
    RANK_FAILURE = 5
    LOST_FILES = 6


class Severity(StrEnum):
    """How an event is shown."""

    ERROR = "error"
    WARNING = "warning"
    ACTION = "action"
    INFO = "info"


class EventKind(StrEnum):
    """Every kind of event with its severity; docs/events.md says what each means, and what people can do about it."""

    severity: Severity

    def __new__(cls, value: str, severity: Severity) -> EventKind:
        member = str.__new__(cls, value)
        member._value_, member.severity = value, severity
        return member

    START = "start", Severity.INFO
    RESUME = "resume", Severity.INFO
    CHANGED_SETTING = "changed setting", Severity.INFO
    PLAN = "plan", Severity.WARNING
    DATA = "data", Severity.WARNING
    FIRST_LOSS = "first loss", Severity.WARNING
    NOT_FINITE = "not finite", Severity.ERROR
    NORM = "warning", Severity.WARNING
    SPIKE = "spike", Severity.ERROR
    SKIP = "skip", Severity.ACTION
    ROLLBACK = "rollback", Severity.ACTION
    ENVELOPE = "envelope", Severity.WARNING
    DEAD_BLOCK = "dead block", Severity.WARNING
    EXPLODING_BLOCK = "exploding block", Severity.WARNING
    SLOW_DOWN = "slow-down", Severity.WARNING
    SPEED = "speed", Severity.INFO
    LOW_MFU = "low MFU", Severity.WARNING
    VALIDATION = "validation", Severity.WARNING
    ACCESSORY = "accessory", Severity.WARNING
    SAMPLE = "sample", Severity.INFO
    FAILED_SAVE = "failed save", Severity.ERROR
    PRUNED = "pruned", Severity.ACTION
    RETENTION = "retention", Severity.WARNING
    PAUSE = "pause", Severity.ACTION
    PAUSE_OVER = "pause over", Severity.INFO
    CORRUPT_CHECKPOINT = "corrupt checkpoint", Severity.ERROR
    RANK_FAILURE = "rank failure", Severity.ERROR
    OUT_OF_MEMORY = "out of memory", Severity.ERROR
    STOP = "stop", Severity.ERROR
    NOT_SAVED = "not saved", Severity.ERROR
    LOST_FILES = "lost files", Severity.ERROR
    SIGNAL = "signal", Severity.INFO
    EARLY_STOP = "early stop", Severity.INFO
    FINISH = "finish", Severity.INFO


_BY_VALUE = {kind.value: kind for kind in EventKind}
STARTS = (EventKind.START, EventKind.RESUME)
FAILURES = (EventKind.NOT_SAVED, EventKind.RANK_FAILURE, EventKind.LOST_FILES)
ENDS = (EventKind.FINISH, EventKind.SIGNAL, EventKind.STOP, EventKind.EARLY_STOP, *FAILURES)


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """A step whose loss or gradient norm is out of line."""

    kind: str  # warning, spike or not finite
    is_new: bool = False  # False in the later steps of a warning or spike: it has been reported
    series: str = ""  # loss or gradient norm
    value: float = math.nan
    expected: float = math.nan
    z: float = math.nan  # of this step: deviation over the run's own noise
    steps: int = 0  # since the rise began, this one included
    step: int = 0  # steps completed when it was seen

    @property
    def first(self) -> int:
        """Steps completed before the rise began."""
        return self.step - max(self.steps, 1)

    def __str__(self) -> str:
        if self.kind == "not finite":
            return f"{self.series} is {self.value}"
        change = f"{self.series} {self.value:.4g} instead of {self.expected:.4g}"
        return f"{change}, {self.z:.1f} sigma, for {self.steps} steps"

    def evidence(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("series", "value", "expected", "z", "steps")}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run: a line of events.jsonl."""

    step: int  # steps completed
    kind: EventKind | str  # str: of a file that another version wrote
    text: str
    action: str = ""  # what the run does about it; empty: nothing
    evidence: Mapping[str, Any] = field(default_factory=dict)  # JSON
    documents: Sequence[str] = ()  # that are involved
    tokens: float | None = None  # trained on by then
    time: float = 0.0  # when it was written
    anomaly: Anomaly | None = None  # to be handled by the run; not written

    @property
    def severity(self) -> Severity:
        return getattr(self.kind, "severity", Severity.WARNING)

    def line(self) -> dict[str, Any]:
        """What events.jsonl says."""
        return {name: getattr(self, name) for name in _FIELDS} | {"documents": list(self.documents)}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Event:
        """What a line of events.jsonl says; whatever else the line has is evidence."""
        kind = str(line.get("kind", "event"))
        evidence = line.get("evidence") or {}
        if not isinstance(evidence, Mapping):
            evidence = {"evidence": evidence}
        documents = line.get("documents") or []
        return cls(
            step=round(line.get("step") or 0),
            kind=_BY_VALUE.get(kind, kind),
            text=str(line.get("text", "")),
            action=str(line.get("action") or ""),
            evidence={**evidence, **{k: v for k, v in line.items() if k not in (*_FIELDS, "documents", "nonfinite")}},
            documents=[str(document) for document in documents] if isinstance(documents, list) else [str(documents)],
            tokens=_number(line.get("tokens")),
            time=_number(line.get("time")) or 0.0,
        )


_FIELDS = ("step", "time", "tokens", "kind", "text", "action", "evidence")


def _number(value: Any) -> float | None:
    """A figure; None: it is none, or not finite."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None
