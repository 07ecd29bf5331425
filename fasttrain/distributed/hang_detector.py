"""The hang detector: ranks that died or hang are named, with the line where they hang, and everybody ends in time.

A rank waits for another one in vain: it gets an error when the other's connection closes, or after some time. Then it
asks all ranks, through the store in which ranks have found each other, since their process groups are broken. A thread
in every rank answers, also where the main thread waits for a rank that is itself only waiting:

    no answer                  the process has died, was stopped, or its interpreter hangs
    the main thread is at ...  and not in a collective: that is where it hangs
    it waits too               not the one

Of `parallel.timeout` seconds the last few are kept for this (`reserve`), so that all ranks have ended when it is over:
those that hang end themselves, and those that do not answer are killed by ranks of the same machine.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from fasttrain.events import ExitCode

GREATEST_RESERVE = 10.0  # seconds
_CALL = "call"
_COLLECTIVES = str(Path(dist.__file__).parent)
_FOR_A_THREAD = (threading.__file__, torch.autograd.graph.__file__)  # where one waits for another thread


class RankFailure(Exception):
    """Another rank died or hangs; the text says which and where."""


def reserve(timeout: float) -> float:
    """Seconds of the time-out that are kept for finding out who is lost, and for ending."""
    return min(timeout / 2, GREATEST_RESERVE)


class HangDetector:
    """Use as a context: within it, this rank answers."""

    def __init__(self, store: dist.PrefixStore, rank: int, world_size: int, timeout: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._seconds = reserve(timeout)
        self._noticed = False  # by the main thread
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="hang detector", daemon=True)

    def __enter__(self) -> HangDetector:
        if self._world_size > 1:
            self._store.set(f"process/{self._rank}", _identity(os.getpid()))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._world_size > 1:
            self._thread.join(1)  # it may wait for a store that is gone

    @contextmanager
    def naming_failed_ranks(self) -> Iterator[None]:
        """Errors that other ranks are the cause of become RankFailure, and the process ends soon, whatever hangs."""
        try:
            yield
        except RuntimeError as error:
            if self._world_size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            self._noticed = True
            _end_after(0.9 * self._seconds)
            raise RankFailure(self._who_is_lost()) from error

    def _who_is_lost(self) -> str:
        """Asked in a thread of its own: a store behind a link that is cut never answers."""
        answer = [_NO_STORE]
        asking = threading.Thread(target=lambda: answer.append(self._ask()), daemon=True)
        asking.start()
        asking.join(self._seconds / 2)
        return answer[-1]

    def _ask(self) -> str:
        ranks = range(self._world_size)
        try:
            store = self._store.clone()  # type: ignore[attr-defined]  # missing in the stubs
            store.set(_CALL, "")
            silent = _await(store, "answer", ranks, self._seconds / 3)
            answers = {rank: store.get(f"answer/{rank}").decode() for rank in ranks if rank not in silent}
            for rank in silent:
                _kill_if_here(store.get(f"process/{rank}").decode())
            store.set(f"heard/{self._rank}", "")
            if self._rank == 0:  # without torchrun the store ends with this process
                _await(store, "heard", [rank for rank, where in answers.items() if not where], self._seconds / 8)
        except RuntimeError:
            return _NO_STORE
        found = [f"rank {rank} died or does not answer" for rank in silent]
        found += [f"rank {rank} hangs {where}" for rank, where in answers.items() if where]
        return "; ".join(found) or "all ranks answer, and wait for each other: they are not in the same collective"

    def _answer(self) -> None:
        """In the thread, with a connection of its own: one that waits would hold up all others."""
        with suppress(RuntimeError):  # the store is gone: its owner has ended, which collectives will tell
            store = self._store.clone()  # type: ignore[attr-defined]  # missing in the stubs
            while not self._left.wait(self._seconds / 12):
                if store.check([_CALL]):
                    store.set(f"answer/{self._rank}", "" if self._noticed else _where_it_hangs())
                    _end_after(0.8 * self._seconds)
                    return


_NO_STORE = "the rank or the node that keeps the addresses does not answer: it has died, or the link to it is cut"


def _await(store: dist.Store, word: str, ranks: Iterable[int], seconds: float) -> list[int]:
    """The ranks that have not said it in time."""
    silent, deadline = list(ranks), time.monotonic() + seconds
    while silent and time.monotonic() < deadline:
        silent = [rank for rank in silent if not store.check([f"{word}/{rank}"])]
        time.sleep(0.02)
    return silent


def _end_after(seconds: float) -> None:
    """Whatever the other threads do. Streams were flushed line by line; nothing that counts is half-written."""
    timer = threading.Timer(seconds, os._exit, [ExitCode.RANK_FAILURE])
    timer.daemon = True
    timer.start()


def _where_it_hangs() -> str:
    """The line of the main thread; empty if it waits for other ranks, by itself or through another thread."""
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident)  # type: ignore[arg-type]
    if _waits(main) or (main.f_code.co_filename in _FOR_A_THREAD and any(map(_waits, frames.values()))):
        return ""
    return f"in {main.f_code.co_name} ({main.f_code.co_filename}:{main.f_lineno})"


def _waits(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_COLLECTIVES)


def _identity(pid: int) -> str:
    """Of a process among all of all machines; empty where the system does not tell, or when it has ended."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        begun = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{machine} {os.stat('/proc/self/ns/pid').st_ino} {begun} {pid}"
    except OSError:
        return ""


def _kill_if_here(identity: str) -> None:
    pid = int(identity.rpartition(" ")[2] or 0)
    if pid and _identity(pid) == identity:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
