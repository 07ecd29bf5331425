"""Where documents begin and end: by the index of a dataset, or by its separators where there is none."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from fasttrain.data.stream import DocumentEnds


class Within(NamedTuple):
    """Of a piece; its fields are those of Piece."""

    begins: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray
    documents_before: int


class Documents(Protocol):
    """Asked for one piece after the other."""

    def within(self, start: int, stop: int, tokens: np.ndarray, /) -> Within: ...


def documents_of(ends: DocumentEnds | None, separator: int | None, tokens: int) -> Documents:
    return _Separated(separator, tokens) if ends is None else _Indexed(ends)


class _Indexed(Documents):
    """Documents by their index."""

    def __init__(self, ends: DocumentEnds) -> None:
        self._ends = ends

    def within(self, start: int, stop: int, _: np.ndarray) -> Within:
        edges = np.array([start, stop], np.int64)  # int64: numpy would convert the whole index to the type of others
        left, right = (self._ends.searchsorted(edges, side=side).tolist() for side in ("left", "right"))
        first = right[0] if start else 0
        before = self._ends[np.array([first - 1])] if first else np.zeros(1, np.int64)
        begins, ends = self._ends[np.arange(*left)], self._ends[np.arange(first, right[1])]
        lengths = np.diff(ends, prepend=before)
        if start == 0:
            return Within(np.concatenate([before, begins]), ends, lengths, 0)
        return Within(begins, ends, lengths, left[0] + 1)


class _Separated(Documents):
    """Documents of a stream without an index: each begins with a separator, the first wherever the stream begins."""

    def __init__(self, separator: int | None, tokens: int) -> None:
        self._separator, self._tokens = separator, tokens
        self._stop = self._count = 0
        self._begin: int | None = None  # of the document that runs on; None: not seen

    def within(self, start: int, stop: int, tokens: np.ndarray) -> Within:
        none = np.empty(0, np.int64)
        begins = none if self._separator is None else np.flatnonzero(tokens == self._separator) + start
        if start == 0 and not (len(begins) and begins[0] == 0):
            begins = np.concatenate([[0], begins])
        known = begins
        if start and start == self._stop and self._begin is not None:
            known = np.concatenate([[self._begin], begins])
        ends = np.append(known[1:], stop) if stop == self._tokens and len(known) else known[1:]
        lengths = ends - known[: len(ends)]
        before, self._count = self._count, self._count + len(begins)
        self._stop, self._begin = stop, int(known[-1]) if len(known) else None
        return Within(begins, ends, lengths, before)
