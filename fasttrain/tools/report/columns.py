"""metrics.jsonl as columns that grow with the file: who looks again reads only what is new. And their decimation.

The columns are the run as it stands, each step once, as read_metrics has it. Steps that the run took back are kept
apart: a spike that was rolled back is worth seeing.

Half a million steps on a thousand pixels are buckets of steps, each with its mean, its lowest and its highest value. No
extreme gets lost, whatever the size of a bucket. Around the steps that matter, events among them, every step has a
bucket of its own, so that a look from nearby shows what happened.
"""

import math
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fasttrain.schema import parse

EXACT = ("step", "time", "tokens")  # float64; figures are float32, for half of the memory
_BYTES = 1 << 21  # to a chunk


class Columns:
    """Figures of a run by step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start()

    def _start(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._size = self._offset = 0  # steps, and bytes of the file that are read
        self._inode = -1
        self._last = -np.inf  # step
        self.taken_back: list[dict[str, np.ndarray]] = []

    def __len__(self) -> int:
        return self._size

    @property
    def names(self) -> list[str]:
        return list(self._arrays)

    def __getitem__(self, name: str) -> np.ndarray:  # (steps,)
        """nan: not finite, or not there; also all of a column that the run does not have."""
        if name not in self._arrays:
            return np.full(self._size, np.nan, dtype=np.float32)
        return self._arrays[name][: self._size]

    def refresh(self, *, patience: float = math.inf) -> bool:
        """Read what was appended, for about so many seconds; whether that was all, but for a line not finished yet."""
        began, is_torn = perf_counter(), False
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._start()
            self._inode = status.st_ino
            file.seek(self._offset)
            while lines := file.readlines(_BYTES):
                is_torn = not lines[-1].endswith(b"\n")
                if is_torn:
                    lines.pop()
                self._offset += sum(map(len, lines))
                self._take(lines)
                if is_torn or perf_counter() - began > patience:
                    break
        return is_torn or self._offset >= status.st_size

    def _take(self, lines: list[bytes]) -> None:
        pending: list[dict[str, Any]] = []
        for data in lines:
            try:
                line = parse(data)
                step = float(line["step"])
            except (ValueError, TypeError, KeyError):  # torn by a kill, or by a full disk
                continue
            if step <= self._last:
                self._append(pending)
                self._cut(step)
                pending = []
            pending.append(line)
            self._last = step
        self._append(pending)

    def _append(self, lines: list[dict[str, Any]]) -> None:
        first, self._size = self._size, self._size + len(lines)
        for name in dict.fromkeys(name for line in lines for name in line):
            try:  # None: not finite
                values = np.array([line.get(name) for line in lines], dtype=np.float64)
            except (ValueError, TypeError):  # no figure
                continue
            if values.ndim == 1:
                with np.errstate(over="ignore"):
                    self._column(name)[first : self._size] = values
        for name in self._arrays:  # those that are not in these lines
            self._column(name)

    def _column(self, name: str) -> np.ndarray:
        """The array of a column, long enough for all steps."""
        array = self._arrays.get(name, np.empty(0, dtype=np.float64 if name in EXACT else np.float32))
        if len(array) < self._size:
            longer = np.full(max(self._size, 2 * len(array)), np.nan, dtype=array.dtype)
            longer[: len(array)] = array
            self._arrays[name] = array = longer
        return array

    def _cut(self, step: float) -> None:
        """Take back the lines of this step and of later ones."""
        kept = int(np.searchsorted(self["step"], step))
        self.taken_back.append({name: self[name][kept:].copy() for name in ("step", "time", "tokens", "loss")})
        for name in self._arrays:
            self[name][kept:] = np.nan
        self._size = kept


columns_of = cache(Columns)  # the same object for the same file, as long as the process lives


AROUND = 40  # steps before and after an event that stay single


class Buckets(NamedTuple):
    """One decimated figure; nan: no finite value."""

    mean: np.ndarray  # (buckets,)
    low: np.ndarray
    high: np.ndarray


def bucket_starts(steps: int, points: int, places: Iterable[int] = ()) -> np.ndarray:
    """The first step, from 0, of each of about `points` buckets; at most half of them are spent on `places`."""
    if steps <= points:
        return np.arange(steps)
    single = np.zeros(steps, dtype=bool)
    for place in (0, *places):
        around = slice(max(place - AROUND, 0), max(place + AROUND, 0))
        if single.sum() + (~single[around]).sum() > points // 2:
            break
        single[around] = True
    starts = single.copy()
    starts[1:] |= single[:-1]  # a bucket never reaches into the steps that stay single
    wide = max(points - int(single.sum()), 2)
    starts[np.linspace(0, steps, wide, endpoint=False).astype(np.int64)] = True
    starts[[0, -1]] = True  # the last step is what people look for
    return np.flatnonzero(starts)


def bucketed(values: np.ndarray, starts: np.ndarray) -> Buckets:  # (steps,), (buckets,)
    """Values that are not finite count for nothing."""
    values = values.astype(np.float64)
    finite = np.isfinite(values)
    found = np.add.reduceat(finite.astype(np.int64), starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    mean = np.add.reduceat(np.where(finite, values, 0.0), starts) / np.maximum(found, 1)
    return Buckets(*(np.where(found > 0, figure, np.nan) for figure in (mean, low, high)))
