"""Whether a run is running, has finished, was stopped or has failed, by what it has written."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fasttrain.events import ENDS, FAILURES, STARTS, Event, EventKind
from fasttrain.tools.report.reading import Record

LOCK = ".lock"  # that a run holds while it lives (process.alone_in)
_FRESH = 120.0  # seconds since its last line, for which a run counts as alive in any case


class State(NamedTuple):
    name: Literal["running", "finished", "stopped", "failed"]
    reason: str = ""


def state_of(record: Record, *, running: bool | None = None, now: float | None = None) -> State:
    """running: whoever asks knows it; None: find out."""
    done, planned = int(record.columns["step"][-1]), record.settings.get("batch.steps")
    since = _since_beginning(record.incidents)
    if running is None:
        running = _is_alive(record, since, done, planned, time.time() if now is None else now)
    if running:
        return State("running")
    for incident in reversed(since):
        if incident.kind in FAILURES or (incident.kind == "failed save" and incident.step >= done):
            return State("failed", incident.text)
        if incident.kind in ENDS:
            return State("finished" if incident.kind == EventKind.FINISH else "stopped", incident.text)
    if planned is not None and done >= planned:
        return State("finished")
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.last_written))
    return State("failed", f"no word since {moment}: killed, or crashed")


def _since_beginning(incidents: list[Event]) -> list[Event]:
    """What the newest process of the run has said."""
    first = max((place for place, incident in enumerate(incidents) if incident.kind in STARTS), default=0)
    return incidents[first:]


def _is_alive(record: Record, since: list[Event], done: int, planned: int | None, now: float) -> bool:
    """A lock that is held says yes. One that is free says nothing: the run may be on another machine."""
    if _is_locked(record.path / LOCK):
        return True
    if any(incident.kind in ENDS for incident in since) or (planned is not None and done >= planned):
        return False
    intervals = np.diff(record.columns["time"][-50:])
    usual = float(np.median(intervals)) if len(intervals) else 0.0
    return now - record.last_written < _FRESH + 20 * usual


def _is_locked(path: Path) -> bool:
    try:
        with open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # none, or a file system without locks
        return False
    return False
