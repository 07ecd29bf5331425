"""Which documents were seen before, by a hash of their content: 16 bytes of memory for each."""

from __future__ import annotations

import hashlib

import numpy as np

DIGEST = np.dtype("S16")  # compared byte by byte; zeros at the end, which numpy does not show, count as such


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST.itemsize).digest()


class Seen:
    """A set of digests in sorted arrays, each less than half as long as the one before: few, whatever their sum."""

    def __init__(self, digests: np.ndarray | None = None) -> None:
        self._arrays: list[np.ndarray] = []
        if digests is not None and len(digests):
            self._arrays.append(np.sort(digests))

    def add(self, digests: np.ndarray) -> np.ndarray:  # (n,) of DIGEST -> (n,) bool
        """Which of them are new, the first of equal ones; they are no longer."""
        fresh = np.zeros(len(digests), bool)
        fresh[np.unique(digests, return_index=True)[1]] = True
        for array in self._arrays:
            places = np.minimum(np.searchsorted(array, digests), len(array) - 1)
            fresh &= array[places] != digests
        if fresh.any():
            array = np.sort(digests[fresh])
            while self._arrays and len(self._arrays[-1]) <= 2 * len(array):
                # timsort: two sorted halves are merged
                array = np.sort(np.concatenate([self._arrays.pop(), array]), kind="stable")
            self._arrays.append(array)
        return fresh
