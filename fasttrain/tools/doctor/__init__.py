"""`fasttrain doctor`: what a machine has, what a run will use of it, and what is missing. docs/doctor.md.

Every question is a function that yields findings. None of them needs what it asks about: a machine without triton, or
without a compiler, is told so.
"""

from dataclasses import dataclass
from typing import Literal

# broken: needed, and a run would fail or be wrong; warning: a run would be slower, or may fail; missing: worth having
Level = Literal["ok", "missing", "warning", "broken"]


@dataclass(frozen=True)
class MachineFinding:
    """One thing that was looked at, what was found, and what to do about it."""

    name: str
    value: str
    level: Level = "ok"
    remedy: str = ""  # a command, or a sentence; where level is not ok
    figure: float | None = None  # the value, for scripts
    unit: str = ""
    section: str = ""  # what it is shown under
