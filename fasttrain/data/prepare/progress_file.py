"""The work directory of a preparation: one process at a time, and on the disk how far it came."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fasttrain.data.manifest import PARTIAL
from fasttrain.data.writer import sync_directory, write_file


def work_directory_of(out: Path) -> Path:
    """Beside the dataset, hidden; by its name, nothing takes it for one."""
    return out.parent / f".{out.name}{PARTIAL}prepare"


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold the directory, as long as this process lives."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = _beside(directory, ".lock")
    with open(path, "a") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked workers do not have it: they may outlive a kill
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"prepare: another process is preparing {directory}; wait for it, or choose another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        directory.mkdir(exist_ok=True)
        yield
        path.unlink()


class Journal:
    """How far a preparation came. What it says is on the disk; what came after it is made again."""

    def __init__(self, directory: Path, task: dict[str, Any]) -> None:
        """task: everything that decides about the result, by names for people."""
        self._directory, self._task = directory, task
        self._path = _beside(directory, ".json")

    def read(self) -> dict[str, Any] | None:
        """What was saved last; None: nothing. Raise if it is work on another task."""
        if not (self._path.exists() and self._directory.exists()):
            return None
        found = json.loads(self._path.read_text("utf-8"))
        differing = [name for name in self._task if found["task"].get(name) != self._task[name]]
        if differing and not found["state"]["documents"]:
            return None  # no work is lost
        if differing:
            name = differing[0]
            raise ValueError(
                f"prepare: {self._directory} holds a preparation that was interrupted, with another {name} "
                f"({found['task'].get(name)}, now {self._task[name]}); repeat that command to go on, or add --restart "
                "to begin anew"
            )
        return found["state"]

    def save(self, state: dict[str, Any]) -> None:
        """Replaces what was saved before, at once or not at all."""
        sync_directory(self._directory)
        write_file(self._path, [json.dumps(dict(task=self._task, state=state))])
        sync_directory(self._path.parent)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def clear(directory: Path) -> None:
    """Delete all that is in the directory, the journal first: without it, nothing is gone on with."""
    _beside(directory, ".json").unlink(missing_ok=True)
    for path in directory.iterdir():
        path.unlink()


def _beside(directory: Path, ending: str) -> Path:
    """Not inside: the directory becomes the dataset, with all that is in it."""
    return directory.with_name(directory.name + ending)
