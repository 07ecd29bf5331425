"""A run as a process: one at a time in a directory, told to stop by signals, and plain about its user's mistakes."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any


@contextmanager
def mistakes_without_traceback(program: str = "fasttrain.train") -> Iterator[None]:
    """What the user can mend is said in one line, once per machine."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        with ExitStack() as stack:
            if not first:
                stack.enter_context(redirect_stderr(io.StringIO()))
                stack.enter_context(redirect_stdout(io.StringIO()))
            yield
    except (ValueError, OSError, ImportError) as error:
        if first:
            print(f"{program}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


@contextmanager
def alone_in(directory: Path, *, is_first: bool) -> Iterator[None]:
    """Hold the run's directory: two processes that train in it would take each other's checkpoints away."""
    if not is_first:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:  # the system frees the lock of a process that dies
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is training in {directory}; wait for it, or choose another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGTERM, Ctrl-C and SIGUSR1 (Slurm) are noted: the run saves after the step. The second one ends it at once."""
    received: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def note(number: int, _: object) -> None:
        received.append(number)
        # Python's own handler of Ctrl-C would unwind, and wait for a save that may be what hangs.
        signal.signal(number, signal.SIG_DFL)

    for noted in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        previous[noted] = signal.signal(noted, note)
    try:
        yield received
    finally:
        for noted, handler in previous.items():
            signal.signal(noted, handler)


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all that it has started, torchrun's ranks for example; returns when none is left."""
    tree = _stopped(pid)
    for each in tree:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    while any(map(_is_running, tree)):
        time.sleep(0.005)


def _stopped(pid: int) -> list[int]:
    """A process and its descendants, halted one by one so that none starts another before it is looked at."""
    try:
        os.kill(pid, signal.SIGSTOP)
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]  # of every thread
    except (ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
        return [pid]
    return [pid, *(each for child in " ".join(lists).split() for each in _stopped(int(child)))]


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state not in "ZX"  # ended, and not asked about by its parent yet
