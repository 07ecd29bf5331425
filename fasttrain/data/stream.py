"""A split as one long stream of tokens, memory-mapped: nothing is read before it is asked for, at any size.

B windows, T + 1 tokens of a window.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np


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
        self._shard = functools.cache(lambda number: MappedFile(shards[number], dtype, header=header))
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self.document_ends: Any = MappedFile(index, np.dtype("<i8")).array if isinstance(index, Path) else index
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
            out[rows[within]] = shard.windows(starts[rows[within]] - (end - len(shard)), length)
            for row in rows[~within]:  # it runs over the end of the shard
                here = int(end - starts[row])
                out[row, :here] = shard.array[-here:]
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
        first = self.document_ends.searchsorted(starts, side="right")
        stop = self.document_ends.searchsorted(starts + (windows.shape[1] - 1), side="right")
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


class MappedFile:
    """A file as an array, of which single pages are read."""

    def __init__(self, path: Path, dtype: np.dtype, *, header: int = 0) -> None:
        with open(path, "rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Otherwise the system reads 128 KB around each page: 200 times what shuffled windows use (docs/data.md).
        self._mapping.madvise(mmap.MADV_RANDOM)
        self._header = header
        self.array = np.frombuffer(self._mapping, dtype, offset=header)

    def __len__(self) -> int:
        return len(self.array)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:  # (n,) int64 -> (n, length)
        if not len(starts):
            return np.empty((0, length), self.array.dtype)
        # Ask for all pages first: they then come at once, not one after the other as they are used.
        width = self.array.itemsize
        first = self._header + starts * width
        begins = first // mmap.PAGESIZE * mmap.PAGESIZE
        for begin, size in zip(begins.tolist(), (first + length * width - begins).tolist(), strict=True):
            self._mapping.madvise(mmap.MADV_WILLNEED, begin, size)
        shape = (len(self) - length + 1, length)
        return np.ndarray(shape, self.array.dtype, self._mapping, self._header, strides=(width, width))[starts]
