"""A split as one long stream of tokens: none is read before it is asked for, at any size.

Files are opened at once and read by the system's calls, not mapped: one that is deleted can still be read, and one that
is truncated or lost is an OSError, where a mapped page would end the process without a word (SIGBUS).

B windows, T + 1 tokens of a window.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from fasttrain.fs import advise

OPEN_FILES = 128  # shards of a stream that are open at once; of more, those used last
SAMPLE_SPANS = 16  # of a sample, evenly spread
PROBES = 16  # windows of many: if these are in memory, few others are not; advice costs half of a read from there
HELD_ENDS = 2**20  # documents whose ends are held in memory, 8 MB


class DocumentEnds(Protocol):
    """Where each document ends, ascending: an array, or what is computed from the index of another program."""

    def __len__(self) -> int: ...
    def __getitem__(self, numbers: Any, /) -> Any: ...
    def searchsorted(self, positions: np.ndarray, /, side: Literal["left", "right"]) -> np.ndarray: ...


class TokenStream:
    """The tokens of several files in a row, and the documents among them.

    A document begins with the separator, if the dataset has one, and runs up to the next document. Without an index, a
    document begins at every separator.
    """

    def __init__(
        self,
        shards: Sequence[Path],  # raw little-endian tokens
        lengths: Sequence[int],  # tokens of each shard
        index: Path | DocumentEnds | None,  # where each document ends; a file: raw little-endian int64
        *,
        dtype: np.dtype,
        separator: int | None = None,
        header: int = 0,  # bytes before the tokens of a shard
    ) -> None:
        self.dtype = dtype = dtype.newbyteorder("<")
        self.separator = separator
        self.lengths = list(lengths)
        self._shard = functools.lru_cache(OPEN_FILES)(
            lambda number: TokenFile(shards[number], dtype, lengths[number], header=header)
        )
        for number in range(min(len(shards), OPEN_FILES)):
            self._shard(number)
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self.document_ends: Any = index
        if isinstance(index, Path):
            file = TokenFile(index, np.dtype("<i8"))
            self.document_ends = document_ends(len(file), functools.partial(gather, file))
        last = len(self) if self.document_ends is None else int(self.document_ends[-1])
        if last != len(self):
            raise ValueError(
                f"dataset: by {index}, the last document ends at token {last}, but there are {len(self)} tokens: the "
                "files do not belong together; copy them again, or prepare the dataset again"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:  # (n,) int64 -> (n, length) of self.dtype
        """`length` tokens from each start."""
        out = np.empty((len(starts), length), self.dtype)
        numbers = np.searchsorted(self._ends, starts, side="right")
        for number in np.unique(numbers).tolist():
            shard, end = self._shard(number), self._ends[number]
            rows = np.flatnonzero(numbers == number)
            within = starts[rows] + length <= end
            if np.count_nonzero(within) == len(starts):
                return shard.windows(starts - (end - len(shard)), length)
            out[rows[within]] = shard.windows(starts[rows[within]] - (end - len(shard)), length)
            for row in rows[~within]:  # it runs over the end of the shard
                here = int(end - starts[row])
                out[row, :here] = shard.read(len(shard) - here, len(shard))
                out[row, here:] = self.windows(end[None], length - here)
        return out

    def boundaries(
        self,
        starts: np.ndarray,  # (B,) int64
        windows: np.ndarray,  # (B, T + 1), the tokens from there
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where documents begin within windows: the row, and the offset in it from 1 to T, both ascending."""
        if self.document_ends is None:
            if self.separator is None:
                return np.empty(0, np.int64), np.empty(0, np.int64)
            rows, offsets = np.divmod(np.flatnonzero(windows[:, 1:] == self.separator), windows.shape[1] - 1)
            return rows, offsets + 1
        # int64 starts: numpy would convert the whole index to the type of other ones
        edges = np.concatenate([starts, starts + (windows.shape[1] - 1)])  # together: they are mostly near each other
        found = self.document_ends.searchsorted(edges, side="right")
        first, stop = found[: len(starts)], found[len(starts) :]
        counts = stop - first
        rows = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = self.document_ends[first[rows] + within] - starts[rows]
        if self.separator is None or not (elsewhere := windows[rows, offsets] != self.separator).any():
            return rows, offsets
        # Some programs end documents with the separator: it then begins the next one, which is the same stream.
        offsets = offsets - (elsewhere & (windows[rows, offsets - 1] == self.separator))
        inside = offsets > 0
        return rows[inside], offsets[inside]


def spread(stream: TokenStream, tokens: int, *, whole: int) -> np.ndarray:  # -> (spans, n)
    """All of the stream if it has up to `whole` tokens, or so many in spans of it."""
    if len(stream) <= whole:
        return stream.windows(np.zeros(1, np.int64), len(stream))
    length = tokens // SAMPLE_SPANS
    return stream.windows(np.linspace(0, len(stream) - length, SAMPLE_SPANS).astype(np.int64), length)


class TokenFile:
    """A file of numbers, open as long as this lives."""

    def __init__(self, path: Path, dtype: np.dtype, count: int | None = None, *, header: int = 0) -> None:
        """count: numbers that the file has to have; None: as many as there are."""
        self._path, self._dtype, self._header = path, dtype, header
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (closed with the last reference)
        # Otherwise the system reads 128 KB around each page: 200 times what shuffled windows use (docs/data.md).
        advise(self._file.fileno(), "RANDOM")
        found = (os.fstat(self._file.fileno()).st_size - header) // dtype.itemsize
        self._count = found if count is None else count
        if found < self._count:
            raise self._truncated()

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> np.ndarray:  # -> (stop - start,)
        return self.windows(np.array([start]), stop - start)[0]

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:  # (n,) int64 -> (n, length)
        file, size = self._file.fileno(), length * self._dtype.itemsize
        begins = (self._header + starts * self._dtype.itemsize).tolist()
        try:
            if len(begins) < 8 * PROBES or not self._in_memory(begins[:: len(begins) // PROBES]):
                advise(file, "WILLNEED", begins, size)  # all of them then come at once, not one after the other
            data = b"".join([os.pread(file, size, begin) for begin in begins])
        except OSError as error:  # which names no file
            error.filename = str(self._path)
            raise
        if len(data) < size * len(begins):
            raise self._truncated()
        return np.frombuffer(data, self._dtype).reshape(len(begins), length)

    def _in_memory(self, begins: list[int]) -> bool:
        """Whether these places can be read without waiting, as far as the system tells."""
        with suppress(OSError, AttributeError):  # AttributeError: macOS
            return all(os.preadv(self._file.fileno(), (bytearray(1),), begin, os.RWF_NOWAIT) for begin in begins)
        return False

    def _truncated(self) -> OSError:
        size, expected = os.fstat(self._file.fileno()).st_size, self._header + self._count * self._dtype.itemsize
        return OSError(f"dataset: {self._path} is truncated: it has {size} bytes instead of {expected}; copy it again")


def gather(file: TokenFile, numbers: np.ndarray) -> np.ndarray:  # (n,) -> (n,) int64
    """What a file has at these places: neighbours, those within a page, are read at once."""
    if not len(numbers):
        return np.empty(0, np.int64)
    low, stop = int(numbers.min()), int(numbers.max()) + 1
    if stop - low <= 2 * len(numbers):
        return file.read(low, stop)[numbers - low]
    breaks = np.flatnonzero(abs(np.diff(numbers)) > 512) + 1
    if len(breaks) == len(numbers) - 1:  # no neighbours
        return file.windows(numbers, 1)[:, 0]
    return np.concatenate(
        [file.read(int(near.min()), int(near.max()) + 1)[near - near.min()] for near in np.split(numbers, breaks)]
    )


EndsAt = Callable[[np.ndarray], np.ndarray]  # (n,) -> (n,) int64: where the documents of these numbers end


def document_ends(count: int, at: EndsAt) -> DocumentEnds:
    """Where documents end: in memory, or as they are asked for."""
    return at(np.arange(count)) if count <= HELD_ENDS else DocumentIndex(count, at)


class DocumentIndex:
    """The ends of more documents than memory should hold: some of them, between which a block is read."""

    def __init__(self, count: int, at: EndsAt) -> None:
        self._count, self._at = count, at
        self._block = max(4096, math.isqrt(count))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, numbers: Any, /) -> np.ndarray:
        """The ends of the documents of these numbers; -1 is the last one."""
        return self._at(np.atleast_1d(numbers) % self._count).reshape(np.shape(numbers))

    def searchsorted(self, positions: np.ndarray, /, side: Literal["left", "right"]) -> np.ndarray:
        """Count, as that of an array: how many documents end before each position, or (right) at it."""
        blocks = np.maximum(self._first_ends.searchsorted(positions, side=side) - 1, 0) * self._block
        found = blocks.copy()
        for first in np.unique(blocks).tolist():
            mine = np.flatnonzero(blocks == first)
            ends = self._at(np.arange(first, min(first + self._block, self._count)))
            found[mine] += ends.searchsorted(positions[mine], side=side)
        return found

    @functools.cached_property
    def _first_ends(self) -> np.ndarray:
        """The end of each block's first document."""
        return self._at(np.arange(0, self._count, self._block))
