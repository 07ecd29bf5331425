"""Figures of benchmarks: a number, its kind, and its limits.

ratio   against a reference in the same run; gates: by its limit, and against saved runs by its margin
exact   the same on every run of the same code, as bytes; gates: may never get worse
time, memory, rate, note   reported and stored, without limits: they are the machine's as much as ours
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MARGIN = 0.15  # of a ratio from run to run, by default


@dataclass(frozen=True, kw_only=True)
class Figure:
    value: float
    unit: str
    kind: str
    at_most: float | None = None
    at_least: float | None = None
    margin: float | None = None  # None: not compared with saved runs
    more_is_better: bool = False

    @property
    def broken(self) -> str:
        """Return the limit that it exceeds; "" if none."""
        if self.at_most is not None and not self.value <= self.at_most:  # not: NaN is wrong too
            return f"{self.value:.4g} is more than {self.at_most:g}"
        if self.at_least is not None and not self.value >= self.at_least:
            return f"{self.value:.4g} is less than {self.at_least:g}"
        return ""

    def worse_than(self, last: float) -> bool:
        """Whether it is worse by more than its margin."""
        if self.margin is None:
            return False
        factor = 1 - self.margin if self.more_is_better else 1 + self.margin
        return self.value < last * factor if self.more_is_better else self.value > last * factor

    def row(self) -> dict[str, Any]:
        """The row that is stored, without unset limits."""
        limits = {"at_most": self.at_most, "at_least": self.at_least, "margin": self.margin}
        row = {"value": self.value, "unit": self.unit, "kind": self.kind}
        return row | {name: limit for name, limit in limits.items() if limit is not None}


def ratio(
    value: float, *, at_most: float | None = None, at_least: float | None = None, margin: float | None = MARGIN
) -> Figure:
    """A ratio of two measurements of one run. Less is better, unless `at_least` is given."""
    more = at_least is not None
    return Figure(
        value=value, unit="", kind="ratio", at_most=at_most, at_least=at_least, margin=margin, more_is_better=more
    )


def exact(value: float, unit: str, *, at_most: float | None = None) -> Figure:
    """A figure that is the same whenever the same code runs: one more is worse."""
    return Figure(value=value, unit=unit, kind="exact", at_most=at_most, margin=0.0)


def seconds(value: float, *, at_most: float | None = None) -> Figure:
    return Figure(value=value, unit="s", kind="time", at_most=at_most)


def memory(value: float) -> Figure:  # bytes
    return Figure(value=value, unit="B", kind="memory")


def rate(value: float, unit: str, *, at_least: float | None = None) -> Figure:
    return Figure(value=value, unit=unit, kind="rate", at_least=at_least)


def figure(value: float | Figure) -> Figure:
    """A plain number is a note."""
    return value if isinstance(value, Figure) else Figure(value=float(value), unit="", kind="note")
