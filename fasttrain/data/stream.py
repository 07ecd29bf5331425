"""A split as one long stream of tokens, memory-mapped: nothing is read before it is asked for, at any size."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class TokenStream:
    """The tokens of several files in a row, and the documents among them.

    A document begins with the separator, if the dataset has one, and runs up to the next document.
    """

    def __init__(
        self,
        shards: Sequence[Path],  # raw little-endian tokens
        lengths: Sequence[int],  # tokens of each shard
        index: Path,  # raw little-endian int64: where each document ends
        *,
        dtype: np.dtype,
        separator: int | None,
    ) -> None:
        self.dtype = dtype.newbyteorder("<")
        self.separator = separator
        self._paths = list(shards)
        self._shards: list[np.ndarray | None] = [None] * len(shards)  # mapped when first read
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self.document_ends = _mapped(index, np.dtype("<i8"))
        last = int(self.document_ends[-1])
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
        for row, start, number in zip(out, starts.tolist(), numbers.tolist(), strict=True):
            filled = 0
            while filled < length:  # more than once only where a window runs over the end of a shard
                shard = self._shard(number)
                local = start + filled - (int(self._ends[number]) - len(shard))
                piece = shard[local : local + length - filled]
                row[filled : filled + len(piece)] = piece
                filled += len(piece)
                number += 1
        return out

    def boundaries(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Ends of documents within windows: the row, and the offset in it from 1 to `length`, both ascending."""
        # int64 starts: numpy would convert the whole index to the type of other ones
        first = np.searchsorted(self.document_ends, starts, side="right")
        stop = np.searchsorted(self.document_ends, starts + length, side="right")
        counts = stop - first
        rows = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, self.document_ends[first[rows] + within] - starts[rows]

    def _shard(self, number: int) -> np.ndarray:
        shard = self._shards[number]
        if shard is None:
            shard = self._shards[number] = _mapped(self._paths[number], self.dtype)
        return shard


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapping, dtype)
