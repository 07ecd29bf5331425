"""A curve in one line of text: ▇▅▃▂▂▂▁▁.

All steps that were added are in it, however many: points are means of as many steps as it takes to have less than
`_POINTS` of them. The scale is that of the last three quarters, so that the fall from the first loss does not flatten
the rest; what is above it is a full block. A point with a value that is not finite is an exclamation mark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"
_POINTS = 512  # even


class Sparkline:
    """add() every step; text() when it is drawn."""

    def __init__(self) -> None:
        self._points: list[float] = []
        self._width = 1  # steps of a point
        self._open: list[float] = []  # steps of the next point

    def add(self, value: float) -> None:
        self._open.append(value)
        if len(self._open) < self._width:
            return
        self._points.append(_mean(self._open))
        self._open = []
        if len(self._points) == _POINTS:
            self._points = _merged(self._points, _POINTS // 2)
            self._width *= 2

    def text(self, columns: int) -> str:
        """At most so many characters; empty before the second step."""
        points = self._points + ([_mean(self._open)] if self._open else [])
        if len(points) < 2 or columns < 2:
            return ""
        shown = _merged(points, columns)
        recent = [point for point in shown[len(shown) // 4 :] if math.isfinite(point)]
        low, high = min(recent, default=0.0), max(recent, default=0.0)
        return "".join(_block(point, low, high) for point in shown)


def _merged(points: Sequence[float], columns: int) -> list[float]:
    """Means of neighbours, as many as fit."""
    count = min(len(points), columns)
    edges = [len(points) * i // count for i in range(count + 1)]
    return [_mean(points[a:b]) for a, b in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "!"
    height = (value - low) / (high - low) if high > low else float(value > high)
    return _BLOCKS[min(max(int(height * len(_BLOCKS)), 0), len(_BLOCKS) - 1)]
