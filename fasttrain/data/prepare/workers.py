"""Chunks to tokens, in several processes: results come in the order of the chunks."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fasttrain.config import PrepareConfig
from fasttrain.data.dataset import RECORD
from fasttrain.data.prepare.documents import DIGEST, EMPTY, Document, Dropped, contents, digest, documents
from fasttrain.data.prepare.inputs import Input, InputChunk
from fasttrain.data.prepare.tokenizer import TokenizerSpec, encoder_of
from fasttrain.data.writer import holds_out
from fasttrain.fs import close_inherited_locks

CHUNKS_AHEAD = 2  # of each worker, read or waiting: memory for them, and no worker is idle

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
    """Call in a child, for work that starts threads: a process with threads cannot be forked safely."""
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
    try:
        for item in items:
            pending.append((item, executor.submit(_call, item)))
            if len(pending) >= CHUNKS_AHEAD * workers:
                yield _first(pending)
        while pending:
            yield _first(pending)
    except BaseException:  # nobody waits for what they are doing
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _first(pending: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    item, future = pending.popleft()
    try:
        return item, future.result()
    except BrokenProcessPool:
        raise OSError(
            "prepare: a worker was killed, perhaps because memory ran out; repeat the command to resume, "
            "with fewer --workers if so"
        ) from None


def _begin(make: Callable[[], Callable[[Any], Any]], parent: int) -> None:
    global _work
    close_inherited_locks()
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


class EncodedChunk(NamedTuple):
    """N documents of a chunk."""

    tokens: np.ndarray  # all of them in a row, each begun by the separator
    lengths: np.ndarray  # (N,) tokens
    num_bytes: np.ndarray  # (N,) of text
    held_out: np.ndarray  # (N,) bool
    digests: np.ndarray  # (N,) of their text
    sources: np.ndarray  # (N,) RECORD; lines counted in the chunk
    dropped: list[Dropped]
    lines: int  # of the last file in it


class Worker:
    """worker(chunk): a process's share of the work."""

    def __init__(
        self, inputs: Sequence[Input], tokenizer: TokenizerSpec, settings: PrepareConfig, dtype: np.dtype
    ) -> None:
        self._inputs, self._tokenizer, self._settings, self._dtype = inputs, tokenizer, settings, dtype
        self._encode = encoder_of(tokenizer, dtype)
        self._separator = np.array([tokenizer.separator], dtype).tobytes()

    def __call__(self, chunk: InputChunk) -> EncodedChunk:
        read = contents(chunk, self._inputs)
        found = [f for content in read for f in documents(content, self._inputs[content.file], self._settings)]
        kept = [document for document in found if isinstance(document, Document)]
        dropped = [drop for drop in found if isinstance(drop, Dropped)]
        tokens = self._encode([document.text for document in kept])
        for number in [number for number, ids in enumerate(tokens) if not ids][::-1]:  # a normalizer left nothing
            dropped.append(Dropped(kept.pop(number).span, EMPTY, "no tokens"))
            del tokens[number]
        encoded = EncodedChunk(
            tokens=np.frombuffer(b"".join(part for ids in tokens for part in (self._separator, ids)), self._dtype),
            lengths=np.array([len(ids) // self._dtype.itemsize + 1 for ids in tokens], np.int64),
            num_bytes=np.array([len(document.data) for document in kept], np.int64),
            held_out=np.array([holds_out(document.data, self._settings.validation) for document in kept], bool),
            digests=np.array([digest(document.data) for document in kept], DIGEST),
            sources=np.array([document.span for document in kept], RECORD),
            dropped=dropped,
            lines=0 if isinstance(read[-1].data, list) else read[-1].data.count(b"\n"),
        )
        if (encoded.tokens == self._tokenizer.separator).sum() != len(encoded.lengths):
            separator = self._tokenizer.separator_text
            raise ValueError(
                f"prepare: the tokenizer makes the separator {separator!r} of other text; choose another --separator"
            )
        return encoded
