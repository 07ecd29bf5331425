"""Runs of the benchmarks as dated files, and the change of a figure since the last run on the same hardware.

A file is one day's rows of one source on one hardware, results/history/<date>-<hardware>-<commit>[-<changes>].json.
Running again adds rows to it, and replaces those of the same name. Rows of different sources are never in one file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import machine
from bench.figures import Figure

HISTORY = Path(__file__).parent / "results" / "history"
GATING = ("ratio", "exact")
RECENT_RUNS = 5  # whose median is usual

Rows = dict[str, dict[str, Any]]  # by name, as in the file


@dataclass(frozen=True, kw_only=True)
class Run:
    """A saved run."""

    date: str
    commit: str
    changes: str  # a digest of what was not committed, or ""
    hardware: dict[str, Any]
    versions: dict[str, str]
    rows: Rows = field(default_factory=dict)
    sensors: dict[str, float] = field(default_factory=dict)  # of the GPU, at the end: clocks, power, heat

    @property
    def file(self) -> str:
        parts = (self.date[:10], machine.slug(self.hardware), self.commit, self.changes)
        return "-".join(filter(None, parts)) + ".json"

    @property
    def label(self) -> str:
        changed = " with changes" if self.changes else ""
        return f"{self.date[:10]}, {self.commit}{changed}, torch {self.versions.get('torch', '?')}"


def this_run(rows: Rows, sensors: dict[str, float] | None = None) -> Run:
    commit, changes = machine.source()
    return Run(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        changes=changes,
        hardware=machine.hardware(),
        versions=machine.versions(),
        rows=rows,
        sensors=sensors or {},
    )


def save(run: Run, folder: Path) -> Path:
    """Write the rows to the file of this day, hardware and source, and keep those that it already has."""
    path = folder / run.file
    rows = (load(path).rows if path.exists() else {}) | run.rows
    head = {
        "date": run.date, "commit": run.commit, "dirty": bool(run.changes), "changes": run.changes,
        "hardware": run.hardware, "versions": run.versions, "sensors": run.sensors,
    }  # fmt: skip
    lines = ",\n".join("  " + json.dumps({"name": name} | row) for name, row in sorted(rows.items()))
    text = json.dumps(head, indent=1).removesuffix("\n}") + f',\n "rows": [\n{lines}\n ]\n}}\n'
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load(path: Path) -> Run:
    try:
        stored = json.loads(path.read_text())
        rows = {row["name"]: {k: v for k, v in row.items() if k != "name"} for row in stored["rows"]}
        keys = ("date", "commit", "changes", "hardware", "versions", "sensors")
        return Run(**{key: stored[key] for key in keys}, rows=rows)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result of the benchmarks: {error!r}; delete it, or restore it") from error


def history(folder: Path) -> list[Run]:
    """Return all runs, the oldest first."""
    return sorted((load(path) for path in folder.glob("*.json")), key=lambda run: run.date)


def saved_values(runs: Iterable[Run], hardware: dict[str, Any]) -> dict[str, list[tuple[float, Run]]]:
    """The values of each row on this very hardware with the runs that they are of, in the order of `runs`."""
    found: dict[str, list[tuple[float, Run]]] = {}
    for run in runs:
        if run.hardware == hardware:
            for name, row in run.rows.items():
                found.setdefault(name, []).append((row["value"], run))
    return found


@dataclass(frozen=True)
class Change:
    """A gating figure against its saved values on the same hardware, the newest of which is the last."""

    name: str
    now: Figure
    saved: Sequence[float]

    @property
    def last(self) -> float | None:
        return self.saved[-1] if self.saved else None

    @property
    def usual(self) -> float | None:
        """The last value of an exact figure; the median of a ratio, so that one lucky run is not the baseline."""
        if not self.saved or self.now.kind == "exact":
            return self.last
        return statistics.median(self.saved[-RECENT_RUNS:])

    @property
    def worse(self) -> bool:
        """Whether it is worse than the last value (which may be worse on purpose) and than is usual."""
        return all(value is not None and self.now.worse_than(value) for value in (self.last, self.usual))

    def line(self, width: int) -> str:
        digits = "{:>12,.0f}" if self.now.kind == "exact" else "{:>12.3f}"
        now = digits.format(self.now.value)
        if self.last is None or self.usual is None:
            return f"  {self.name:<{width}}{now}{'':>24}       new"
        share = self.now.value / self.last - 1 if self.last else 0.0
        mark = f"  WORSE, by more than {self.now.margin:.0%}" if self.worse else ""
        before = digits.format(self.last) + digits.format(self.usual)
        return f"  {self.name:<{width}}{now}{before}  {share:>+8.1%}{mark}"


def changes(figures: dict[str, Figure], runs: Iterable[Run], hardware: dict[str, Any]) -> list[Change]:
    saved = saved_values(runs, hardware)
    return [
        Change(name, figure, [value for value, _ in saved.get(name, [])])
        for name, figure in figures.items()
        if figure.kind in GATING and figure.margin is not None
    ]
