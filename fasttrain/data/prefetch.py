"""Batches ahead of their step, from a background thread. Reading and copying release the interpreter's lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """`at(step)`, as `read(step)` gives it, with the `ahead` steps after it read meanwhile.

    Steps may come in any order: what was read for steps no longer ahead is dropped. An error of `read` is raised by the
    `at` of its own step. Use as a context, or call close().
    """

    def __init__(self, read: Callable[[int], Item], *, ahead: int, stop: int | None = None) -> None:
        """stop: read nothing ahead from this step on."""
        self._read, self._ahead, self._stop = read, ahead, stop
        self._pending: dict[int, Future[Item]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fasttrain-prefetch")
        self.waited = 0.0
        """Seconds that the last `at` took: the time that a step waited for data."""

    def at(self, step: int) -> Item:
        begin = time.perf_counter()
        last = step + self._ahead if self._stop is None else min(step + self._ahead, self._stop - 1)
        wanted = range(step, max(step, last) + 1)
        for number in [number for number in self._pending if number not in wanted]:
            self._pending.pop(number).cancel()
        for number in wanted:
            if number not in self._pending:
                self._pending[number] = self._thread.submit(self._read, number)
        try:
            return self._pending.pop(step).result()
        finally:
            self.waited = time.perf_counter() - begin

    def forget(self) -> None:
        """Drop what was read ahead, because steps have other batches from now on."""
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()

    def close(self) -> None:
        """Stop reading; returns once the thread has ended."""
        self._thread.shutdown(cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
