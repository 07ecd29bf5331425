"""All that a run's directory says of it: figures, validations, events, checkpoints, settings; and whether it runs,
has finished, was stopped or has failed.
"""

import contextlib
import os
import re
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fasttrain.checkpoint.committed import Checkpoint, committed_paths
from fasttrain.checkpoint.retention import quarantined
from fasttrain.config_toml import flat
from fasttrain.events import ENDS, FAILURES, STARTS, Event, EventKind
from fasttrain.fs import is_locked
from fasttrain.metrics.jsonl import read_evaluations, read_events, read_validations
from fasttrain.rundir import RunDir
from fasttrain.schema import build, parse
from fasttrain.tools.report.columns import Columns, columns_of

_FRESH = 120.0  # seconds since its last line, for which a run counts as alive in any case


class Clock:
    """Hours of training: what lies between two processes of a run does not count."""

    def __init__(self, starts: np.ndarray, moments: np.ndarray) -> None:
        """When its processes began, and when it wrote a line of any kind; both ascending."""
        self._starts = starts if len(starts) else moments[:1]
        last = np.searchsorted(moments, self._starts[1:], side="left") - 1  # of each process but the newest
        ends = np.maximum(moments[np.maximum(last, 0)], self._starts[:-1])
        self._before = np.concatenate([[0.0], np.cumsum(ends - self._starts[:-1])])  # seconds of earlier processes

    def hours(self, moments: np.ndarray) -> np.ndarray:
        process = np.maximum(np.searchsorted(self._starts, moments, side="right") - 1, 0)
        return np.maximum(self._before[process] + moments - self._starts[process], 0) / 3600


class CheckpointEntry(NamedTuple):
    """A checkpoint on the disk."""

    path: Path
    step: int
    time: float
    bytes: int | None  # None: it cannot be read
    loss: float | None
    state: str  # committed: compared with what was meant when it was written; quarantined; corrupt
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that the directory of a run says of it, as it stands."""

    path: Path
    name: str
    columns: Columns
    validations: dict[str, list[dict[str, Any]]]  # by set
    evaluations: list[dict[str, Any]]
    events: list[Event]
    checkpoints: list[CheckpointEntry]
    settings: dict[str, Any]  # key with dots and value, as in config.toml; empty: there is none
    clock: Clock
    metadata: dict[str, Any]  # parameters, hardware, ranks, versions: as its starts say

    @property
    def last_written(self) -> float:
        """When it wrote its last line."""
        return max([float(self.columns["time"][-1]), *(event.time for event in self.events)])


def read_records(runs: Sequence[Path]) -> list[RunRecord]:
    """What the directories say now, each once."""
    runs = list(dict.fromkeys(Path(run) for run in runs))
    return [_read(run, name) for run, name in zip(runs, _names(runs), strict=True)]


def catch_up(runs: Sequence[Path], *, patience: float) -> bool:
    """Read of each run what is new, for about so many seconds; whether that was all."""
    done = [columns_of(_metrics(Path(run))).refresh(patience=patience) for run in runs]
    return all(done)


def _read(run: Path, name: str) -> RunRecord:
    columns = columns_of(_metrics(run))
    columns.refresh()
    if not len(columns):
        raise ValueError(f"{RunDir(run).metrics} has no step yet; wait for the first one")
    events = [Event.of(line) for line in read_events(run)]
    settings: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # of another program, or none
        settings = dict(flat(parse(RunDir(run).config.read_text("utf-8"), tomllib.loads)))
        build(int | None, settings.get("batch.steps"))
    validations: dict[str, list[dict[str, Any]]] = {}
    for line in read_validations(run):
        validations.setdefault(str(line["set"]), []).append(line)
    written = [columns["time"], *(gone["time"] for gone in columns.taken_back), [event.time for event in events]]
    moments = np.concatenate([np.asarray(times, dtype=np.float64) for times in written])
    starts = [event for event in events if event.kind in STARTS]
    return RunRecord(
        path=run, name=name, columns=columns, events=events, settings=settings,
        validations=validations, evaluations=read_evaluations(run),
        checkpoints=_checkpoints(RunDir(run).checkpoints),
        clock=Clock(np.array(sorted(event.time for event in starts)), np.sort(moments[np.isfinite(moments)])),
        metadata={name: value for event in starts for name, value in event.evidence.items()},
    )  # fmt: skip


def _metrics(run: Path) -> Path:
    rundir, path = RunDir(run), RunDir(run).metrics
    if path.exists():
        return path.absolute()
    if not run.is_dir():
        raise FileNotFoundError(f"{run} {'is not a directory' if run.exists() else 'does not exist'}; name a run")
    if rundir.config.exists() or rundir.segments.exists():
        raise ValueError(f"{run} has no {path.name} yet; wait for the first step")
    raise ValueError(f"{run} is not the directory of a run: it has no {path.name}")


def _names(runs: list[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell the runs apart."""
    paths = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths), default=1) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def _checkpoints(directory: Path) -> list[CheckpointEntry]:
    found = [_saved(path, "committed") for path in committed_paths(directory)]
    found += [_saved(path, "quarantined") for path in quarantined(directory)]
    return sorted(found, key=lambda saved: saved.step)


def _saved(path: Path, state: str) -> CheckpointEntry:
    """state: of one that nothing is wrong with."""
    step, time = int(re.findall(r"step-(\d+)", path.name)[0]), 0.0
    try:
        time = os.stat(path).st_mtime
        checkpoint = Checkpoint.read(path)
    except Exception as error:  # whatever the disk does, it is this checkpoint that has it
        return CheckpointEntry(path, step, time, None, None, "corrupt", str(error).removeprefix("checkpoint: "))
    return CheckpointEntry(path, checkpoint.step, time, checkpoint.bytes, checkpoint.loss, state)


class RunState(NamedTuple):
    name: Literal["running", "finished", "stopped", "failed"]
    reason: str = ""


def state_of(record: RunRecord, *, running: bool | None = None, now: float | None = None) -> RunState:
    """running: whoever asks knows it; None: find out."""
    done, planned = int(record.columns["step"][-1]), record.settings.get("batch.steps")
    first = max((place for place, event in enumerate(record.events) if event.kind in STARTS), default=0)
    since = record.events[first:]  # of the newest process of the run
    if running is None:
        running = _is_alive(record, since, done, planned, time.time() if now is None else now)
    if running:
        return RunState("running")
    for event in reversed(since):
        if event.kind in FAILURES or (event.kind == EventKind.FAILED_SAVE and event.step >= done):
            return RunState("failed", event.text)
        if event.kind in ENDS:
            return RunState("finished" if event.kind == EventKind.FINISH else "stopped", event.text)
    if planned is not None and done >= planned:
        return RunState("finished")
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.last_written))
    return RunState("failed", f"no word since {moment}: killed, or crashed")


def _is_alive(record: RunRecord, since: list[Event], done: int, planned: int | None, now: float) -> bool:
    """A lock that is held says yes. One that is free says nothing: the run may be on another machine."""
    if is_locked(RunDir(record.path).lock):
        return True
    if any(event.kind in ENDS for event in since) or (planned is not None and done >= planned):
        return False
    intervals = np.diff(record.columns["time"][-50:])
    usual = float(np.median(intervals)) if len(intervals) else 0.0
    return now - record.last_written < _FRESH + 20 * usual
