"""Work on pieces in several processes, with results in the order of the pieces."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

AHEAD = 2  # pieces of a worker that are read or wait: memory for them, and none is idle

Item = TypeVar("Item")
Result = TypeVar("Result")

_work: Callable[[Any], Any]


def in_order(
    make: Callable[[], Callable[[Item], Result]],  # called in each process: what does the work there
    items: Iterable[Item],
    workers: int,
) -> Generator[tuple[Item, Result], None, None]:
    """Each item with its result. With one worker, in this process."""
    if workers > 1:
        yield from _in_processes(make, items, workers)
        return
    work = make()
    for item in items:
        yield item, work(item)


def in_another_process(call: Callable[[], Result]) -> Result:
    """For work that starts threads: a process with threads cannot be forked safely."""
    ((_, result),) = _in_processes(lambda: lambda _: call(), [None], 1)
    return result


def _in_processes(
    make: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    # forked: a worker needs none of the seconds, nor the memory, that importing torch takes
    context = multiprocessing.get_context("fork")
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(make, os.getpid()))
    pending: deque[tuple[Item, Future[Result]]] = deque()
    finished = False
    try:
        for item in items:
            pending.append((item, executor.submit(_call, item)))
            if len(pending) >= AHEAD * workers:
                yield _first(pending)
        while pending:
            yield _first(pending)
        finished = True
    finally:
        if not finished:  # nobody waits for what they are doing
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        executor.shutdown(wait=True, cancel_futures=True)


def _first(pending: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    item, future = pending.popleft()
    try:
        return item, future.result()
    except BrokenProcessPool:
        raise OSError(
            "prepare: a worker was killed, perhaps because memory ran out; the same command goes on, with fewer "
            "--workers if you say so"
        ) from None


def _begin(make: Callable[[], Callable[[Any], Any]], parent: int) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are as many as there are cores
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _work = make()


def _end_with(parent: int) -> None:
    """A parent that was killed tells nobody."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _call(item: Any) -> Any:
    return _work(item)
