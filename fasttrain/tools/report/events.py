"""What happened in a run, and how serious each kind of it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["bad", "warning", "action", "note"]

SAMPLE = "sample"
BEGINS = ("start", "resume")
FINISH = "finish"
FAILURES = ("unsaved", "lost rank")
ENDS = (FINISH, "signal", "stop", "patience", *FAILURES)
LEVELS: dict[str, Level] = {  # of docs/watch.md's kinds; the others are warnings
    **dict.fromkeys(("spike", "not finite", "failed save", "damaged checkpoint", "stop", *FAILURES), "bad"),
    **dict.fromkeys(("rollback", "skip", "pause", "pruned"), "action"),
    **dict.fromkeys((*BEGINS, "changed setting", "speed", "pause over", SAMPLE), "note"),
    **dict.fromkeys((FINISH, "signal", "patience"), "note"),
}
_OWN = ("step", "time", "tokens", "kind", "text", "action", "evidence", "documents", "nonfinite")


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A line of incidents.jsonl."""

    step: int
    time: float
    tokens: float | None  # None: it does not say
    kind: str
    text: str
    action: str  # what was done about it; empty: nothing, or the text says it
    evidence: dict[str, Any]
    documents: list[str]

    @property
    def level(self) -> Level:
        """A kind that nobody has classified is a warning."""
        return LEVELS.get(self.kind, "warning")

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Incident:
        """Whatever else the line has is evidence."""
        evidence = line.get("evidence") or {}
        if not isinstance(evidence, Mapping):
            evidence = {"evidence": evidence}
        documents = line.get("documents") or []
        return cls(
            step=int(line.get("step") or 0),
            time=float(line.get("time") or 0.0),
            tokens=line.get("tokens"),
            kind=str(line.get("kind", "event")),
            text=str(line.get("text", "")),
            action=str(line.get("action") or ""),
            evidence={**evidence, **{key: value for key, value in line.items() if key not in _OWN}},
            documents=[str(document) for document in documents] if isinstance(documents, list) else [str(documents)],
        )
