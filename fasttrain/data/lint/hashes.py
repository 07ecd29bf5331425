"""Hashes of spans of tokens, and a bounded sample of them that still knows how many are alike.

The hash of tokens x[a:b] is the sum of r[x[i]] * B**(i - a) modulo 2**64, with a random number r for each id and an odd
B. With the sums S of r[x[i]] * B**i up to each place of a piece, that is (S[b] - S[a]) * B**-a, so all spans of a
piece cost one pass.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: its powers have inverses modulo 2**64
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))


class Repeats(NamedTuple):
    places: np.ndarray  # of all hashes of a sample, in the order of the stream
    again: np.ndarray  # whether the same stood at an earlier place


class Hasher:
    """Prefix sums of pieces of up to `size` tokens."""

    def __init__(self, vocab: int, size: int) -> None:
        self._random = np.random.default_rng(0).integers(0, 2**64, size=vocab, dtype=np.uint64)
        self.powers, self.inverses = _powers(BASE, size + 1), _powers(_INVERSE, size + 1)

    def sums(self, tokens: np.ndarray) -> np.ndarray:  # (n,) -> (n + 1,) uint64
        out = np.zeros(len(tokens) + 1, np.uint64)
        terms = np.take(self._random, tokens, mode="clip")  # an id that is not in the vocabulary counts as the last
        terms *= self.powers[: len(tokens)]
        np.cumsum(terms, out=out[1:])
        return out

    def runs(self, sums: np.ndarray, length: int) -> np.ndarray:  # -> (n - length + 1,)
        """The hash of every `length` tokens."""
        hashes = sums[length:] - sums[:-length]
        hashes *= self.inverses[: len(hashes)]
        return hashes


class Sample:
    """Hashes below a limit, with where they were seen; the limit falls as they become too many.

    Equal hashes stay or go together, so that the share of repeats in the sample is that of all, and what is kept does
    not depend on the order. 16 bytes for each.
    """

    def __init__(self, capacity: int, *, expected: int = 0) -> None:
        self._capacity, self._kept = capacity, 0
        self._hashes: list[np.ndarray] = []
        self._places: list[np.ndarray] = []
        self.halvings = 0
        while expected >> self.halvings > 2 * capacity:  # do not keep first what will be dropped later
            self.halvings += 1

    def add(self, hashes: np.ndarray, places: np.ndarray | int) -> None:  # (n,) uint64, (n,) or the place of the first
        chosen = np.flatnonzero(hashes <= self.limit)
        self._hashes.append(hashes[chosen])
        self._places.append(chosen + places if isinstance(places, int) else places[chosen])
        self._kept += len(chosen)
        while self._kept > self._capacity:
            self.halvings += 1
            all_hashes, all_places = self.all()
            below = all_hashes <= self.limit
            self._hashes, self._places, self._kept = [all_hashes[below]], [all_places[below]], int(below.sum())

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and places, in the order of the stream."""
        none_hashes, none_places = np.empty(0, np.uint64), np.empty(0, np.int64)
        return np.concatenate([none_hashes, *self._hashes]), np.concatenate([none_places, *self._places])

    def repeats(self) -> Repeats:
        hashes, places = self.all()
        order = np.argsort(hashes, kind="stable")
        again = np.zeros(len(hashes), bool)
        again[order[1:]] = hashes[order[1:]] == hashes[order[:-1]]
        return Repeats(places, again)

    @property
    def limit(self) -> np.uint64:
        return np.uint64((2**64 - 1) >> self.halvings)


def mixed(hashes: np.ndarray, lengths: np.ndarray) -> np.ndarray:  # uint64, int64 -> uint64
    """With the lengths, spread evenly over all 64 bits."""
    x = hashes ^ (lengths.astype(np.uint64) * BASE)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


def _powers(base: np.uint64, count: int) -> np.ndarray:
    out = np.full(count, base, np.uint64)
    out[0] = 1
    return np.cumprod(out)
