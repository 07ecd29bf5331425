"""Half a million steps on a thousand pixels: buckets of steps, each with its mean, its lowest and its highest value.

No extreme gets lost, whatever the size of a bucket. Around the steps that matter, incidents among them, every step has
a bucket of its own, so that a look from nearby shows what happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

AROUND = 40  # steps before and after an incident that stay single


class Buckets(NamedTuple):
    """Of one figure; nan: no finite value."""

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


def bucketed(
    values: np.ndarray,  # (steps,)
    starts: np.ndarray,  # (buckets,)
) -> Buckets:
    """Values that are not finite count for nothing."""
    values = values.astype(np.float64)
    finite = np.isfinite(values)
    if len(starts) == len(values):
        alone = np.where(finite, values, np.nan)
        return Buckets(alone, alone, alone)
    found = np.add.reduceat(finite.astype(np.int64), starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    mean = np.add.reduceat(np.where(finite, values, 0.0), starts) / np.maximum(found, 1)
    return Buckets(*(np.where(found > 0, figure, np.nan) for figure in (mean, low, high)))
