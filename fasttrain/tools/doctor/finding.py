"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# broken: needed, and a run would fail or be wrong; warning: a run would be slower, or may fail; missing: worth having
Level = Literal["ok", "missing", "warning", "broken"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What it is, what was found, and what to do about it."""

    section: str
    name: str
    value: str
    level: Level = "ok"
    remedy: str = ""  # a command, or a sentence; where level is not ok
    figure: float | None = None  # the value, for scripts
    unit: str = ""


def gib(bytes: float) -> str:
    return f"{bytes / 2**30:,.1f} GiB"
