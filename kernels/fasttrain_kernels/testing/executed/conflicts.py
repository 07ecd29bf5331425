"""Bank conflicts: how often a warp's access to shared memory has to be repeated.

32 banks of 4 bytes. Lanes that read the same word share it; different words of one bank are served one after another.
An access of 8 bytes per lane is served for half a warp at a time, of 16 bytes for a quarter.
"""

from __future__ import annotations

import numpy as np

from fasttrain_kernels.testing.executed.values import Array

_BANKS = 32


def wavefronts(address: Array, warp: Array, width: int) -> tuple[int, int]:  # per lane; bytes per lane
    """Return the accesses that the warps take, and what they would take without conflicts."""
    words = max(1, width // 4)
    group = warp * words + _rank(warp) // (32 // words)
    word = (address // 4)[:, None] + np.arange(words)
    key = np.unique(group[:, None].repeat(words, 1).reshape(-1) << 40 | word.reshape(-1))
    where, bank = key >> 40, key & (_BANKS - 1)
    _, index = np.unique(where, return_inverse=True)
    counts = np.bincount(index * _BANKS + bank, minlength=(index[-1] + 1) * _BANKS).reshape(-1, _BANKS)
    return int(counts.max(1).sum()), len(counts)


def _rank(warp: Array) -> Array:
    """The position of each active lane within its warp; warps are in order."""
    first = np.r_[True, warp[1:] != warp[:-1]]
    start = np.maximum.accumulate(np.where(first, np.arange(len(warp)), 0))
    return np.arange(len(warp)) - start


class ConflictCounter:
    """Counts of a launch. Access patterns repeat from iteration to iteration: each is counted once."""

    def __init__(self) -> None:
        self.accesses = 0
        self.conflicts = 0
        self._known: dict[int, tuple[int, int]] = {}

    def note(self, address: Array, warp: Array, width: int) -> None:
        relative = address - address[0] // 128 * 128
        key = hash((width, relative.tobytes(), warp.tobytes()))
        if key not in self._known:
            self._known[key] = wavefronts(relative + (1 << 20), warp, width)
        taken, ideal = self._known[key]
        self.accesses += ideal
        self.conflicts += taken - ideal
