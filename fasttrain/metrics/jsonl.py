"""The record that every run has: files of JSON lines, which any tool reads and a kill cannot spoil.

    RUN/metrics.jsonl      {"step": 120, "time": 1767225600.0, "loss": 3.214, ...}     one line per step
    RUN/validation.jsonl   {"step": 100, "time": ..., "set": "held-out", "loss": ...}  one line per set and validation
    RUN/events.jsonl       {"step": 117, "time": ..., "tokens": ..., "kind": "spike", "text": ..., "action": ...,
                            "evidence": {...}, "documents": [...]}                     one line per event

Lines are only ever appended, each with a single write, so that a killed process loses at most the line that it was
writing. A resumed run goes back to its checkpoint and writes some steps again: reading keeps the run as it stands, and
the file keeps what happened.
"""

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasttrain.config import STEPS
from fasttrain.events import Event
from fasttrain.rundir import RunDir
from fasttrain.schema import parse

_LONGEST_LINES = 1 << 18  # bytes: more than the last few lines have

_logger = logging.getLogger(__name__)


class LineFile:
    """A file of JSON lines to append to. A full disk costs lines, with one warning, and not the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  (closed by close)
        self._file.seek(max(self._file.tell() - 1, 0))
        self._whole = self._file.read(1) in (b"\n", b"")
        self._warned = False

    def append(self, line: Mapping[str, Any]) -> None:
        data = b"" if self._whole else b"\n"  # what was torn becomes a line of its own, which reading skips
        data += _encoded(line) + b"\n"
        try:
            self._whole = self._file.write(data) == len(data)
        except OSError as error:
            self._whole = False
            if not self._warned:
                _logger.warning("metrics: cannot write %s: %s; lines are lost until it can", self._path, error.strerror)
                self._warned = True

    def close(self) -> None:
        self._file.close()


class JsonLines:
    """The sink of a run's JSON lines."""

    def __init__(self, rundir: RunDir) -> None:
        rundir.path.mkdir(parents=True, exist_ok=True)
        files = (rundir.metrics, rundir.validations, rundir.events)
        self._metrics, self._validation, self._events = map(LineFile, files)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics.append({"step": step, "time": time.time(), **values})

    def validation(self, step: int, name: str, values: Mapping[str, float]) -> None:
        self._validation.append({"step": step, "time": time.time(), "set": name, **values})

    def event(self, event: Event) -> None:
        self._events.append(event.line())

    def close(self, exit_code: int) -> None:
        for file in (self._metrics, self._validation, self._events):
            file.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The steps of a run in order, each once. Values that were not finite are nan, and named in "nonfinite"."""
    return _as_it_stands(_lines(RunDir(run).metrics))


def read_events(run: Path) -> list[dict[str, Any]]:
    """The events of a run in the order in which they happened, also of steps that it took back."""
    return _lines(RunDir(run).events)


def read_validations(run: Path) -> list[dict[str, Any]]:
    """The validations of a run in order, each set once per step."""
    by_set: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(RunDir(run).validations):
        figures = {key: value for key, value in line.items() if isinstance(value, int | float | None)}
        by_set.setdefault(str(line.get("set")), []).append(figures | {"set": str(line.get("set"))})
    return sorted((line for lines in by_set.values() for line in _as_it_stands(lines)), key=lambda line: line["step"])


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """What fasttrain eval has found, in the order in which it was asked."""
    return _lines(RunDir(run).evaluations)


def last_step(run: Path) -> int:
    """The step of the last line of metrics.jsonl, without reading the others; 0: there is none."""
    try:
        with open(RunDir(run).metrics, "rb") as file:
            file.seek(max(file.seek(0, 2) - _LONGEST_LINES, 0))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        if found := _line(line):
            return round(found["step"])
    return 0


def _as_it_stands(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what the run took back: a line undoes the earlier lines of its step and of all later steps."""
    standing: list[dict[str, Any]] = []
    for line in lines:
        while standing and standing[-1]["step"] >= line["step"]:
            standing.pop()
        standing.append(line)
    return standing


def _lines(path: Path) -> list[dict[str, Any]]:
    found = map(_line, path.read_bytes().splitlines() if path.exists() else [])
    return [line for line in found if line is not None]


def _line(data: bytes) -> dict[str, Any] | None:
    """What a line says; None: it was torn by a kill or a full disk, or is nothing that a run writes."""
    try:
        line = parse(data)
        if STEPS.problem(line["step"], float):
            return None
        return line | dict.fromkeys(line.get("nonfinite", ()), math.nan)
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


def _encoded(line: Mapping[str, Any]) -> bytes:
    """JSON has no nan and no inf: they are null, and "nonfinite" lists their keys."""
    try:
        return json.dumps(line, allow_nan=False).encode()
    except ValueError:
        finite = json.loads(json.dumps(line), parse_constant=lambda _: None)
        bad = [key for key, value in line.items() if value is not None and finite[key] is None]
        return json.dumps({**finite, "nonfinite": bad}).encode()
