"""Hours of training by the clock: what lies between two processes of a run does not count."""

from __future__ import annotations

import numpy as np


class Clock:
    """Of a run that may have been resumed."""

    def __init__(
        self,
        starts: np.ndarray,  # when its processes began, ascending
        moments: np.ndarray,  # when it wrote a line of any kind, ascending
    ) -> None:
        self._starts = starts if len(starts) else moments[:1]
        last = np.searchsorted(moments, self._starts[1:], side="left") - 1  # of each process but the newest
        ends = np.maximum(moments[np.maximum(last, 0)], self._starts[:-1])
        self._before = np.concatenate([[0.0], np.cumsum(ends - self._starts[:-1])])  # seconds of earlier processes

    def hours(self, moments: np.ndarray) -> np.ndarray:
        process = np.maximum(np.searchsorted(self._starts, moments, side="right") - 1, 0)
        return np.maximum(self._before[process] + moments - self._starts[process], 0) / 3600
