"""In which order a run sees the samples of its dataset: arithmetic, with no state and no table.

Sample g of a run (g = step * sequences of a step + place in the step) lies in epoch g // size, at place g % size. Each
epoch has a permutation of its own, computed for single places: a Feistel network over pairs (left, right) with

    place = left * b + right,    left < a,  right < b,    a, b close to sqrt(size),  a * b >= size

whose rounds alternate left += F(right) mod a and right += F(left) mod b, F a keyed hash. A round can be undone, so that
the whole is a permutation of a * b places. A result >= size goes through again until it is below (cycle walking), which
makes it a permutation of `size` places; a * b < size + a, so that this is rare. Memory is O(1), at any size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

_Sides = np.uint64 | np.ndarray  # of one dataset, or of each row's

ROUNDS = 8  # 4 would do for 10,000 samples; 6 leave short epochs uneven (tests/fasttrain/data/test_order.py)


def samples_of_run(first: int, count: int, *, size: int, seed: int) -> np.ndarray:  # -> (count,) int64 below size
    """Samples `first` to `first + count` of a run over a dataset of `size` samples."""
    return samples_at(np.arange(first, first + count), size=size, seed=seed)


def samples_at(numbers: np.ndarray, *, size: int, seed: int) -> np.ndarray:  # (n,) ascending -> (n,) int64 below size
    """The samples of a run that have these numbers."""
    epochs, places = np.divmod(numbers, size)
    out = np.empty(len(numbers), np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):  # a step may lie in several
        here = epochs == epoch
        out[here] = permuted(places[here], size=size, seed=seed, epoch=epoch)
    return out


def samples_of_several(
    datasets: np.ndarray,  # (n,) numbers of datasets
    numbers: np.ndarray,  # (n,) of samples in their runs
    *,
    sizes: Sequence[int],
    seeds: Sequence[int],
) -> np.ndarray:  # -> (n,) int64
    """`samples_at` of several datasets, all at once: on a few samples, a call of NumPy costs more than its work."""
    size, a, b = np.array([(size, *_sides(size)) for size in sizes], np.uint64).T[:, datasets]
    epochs, places = np.divmod(numbers.astype(np.uint64), size)
    orders, of_row = np.unique(epochs * len(sizes) + datasets.astype(np.uint64), return_inverse=True)
    found = (divmod(order, len(sizes)) for order in orders.tolist())
    keys = np.stack([keys_of(seeds[dataset], epoch) for epoch, dataset in found], axis=1)[:, of_row]
    return _below(size, _network(places, a, b, keys), lambda out, rows: _network(out, a[rows], b[rows], keys[:, rows]))


def permuted(places: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:  # (n,) int64 -> (n,) int64
    """The samples at `places` of an epoch."""
    (a, b), keys = _sides(size), keys_of(seed, epoch)
    return _below(size, _network(places.astype(np.uint64), a, b, keys), lambda out, _: _network(out, a, b, keys))


def places_of(samples: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:  # (n,) int64 -> (n,) int64
    """The places of an epoch at which samples come: the inverse of `permuted`."""
    (a, b), keys = _sides(size), keys_of(seed, epoch)
    return _below(
        size, _network_back(samples.astype(np.uint64), a, b, keys), lambda out, _: _network_back(out, a, b, keys)
    )


def _sides(size: int) -> tuple[np.uint64, np.uint64]:
    """a and b."""
    a = math.isqrt(size - 1) + 1
    return np.uint64(a), np.uint64(-(-size // a))


def _below(
    size: int | np.ndarray, out: np.ndarray, again: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """What is not below size goes through again, until it is."""
    while (outside := out >= size).any():
        out[outside] = again(out[outside], outside)
    return out.astype(np.int64)


def _network(places: np.ndarray, a: _Sides, b: _Sides, keys: np.ndarray) -> np.ndarray:
    left, right = np.divmod(places, b)
    for number in range(0, ROUNDS, 2):
        left = (left + hashed(right, keys[number])) % a
        right = (right + hashed(left, keys[number + 1])) % b
    return left * b + right


def _network_back(places: np.ndarray, a: _Sides, b: _Sides, keys: np.ndarray) -> np.ndarray:
    left, right = np.divmod(places, b)
    for number in range(ROUNDS - 2, -1, -2):
        right = (right + b - hashed(left, keys[number + 1]) % b) % b
        left = (left + a - hashed(right, keys[number]) % a) % a
    return left * b + right


def hashed(
    x: np.ndarray, key: np.uint64 | np.ndarray
) -> np.ndarray:  # uint64 arrays wrap around silently, as meant here
    """The finaliser of splitmix64: each bit of the input changes each bit of the result half of the time.

    63 bits, so that half a place can be added without a wrap, which would break the permutation.
    """
    x = x + key  # from here on in place: calls are many, and arrays short
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    x ^= x >> 31
    x >>= 1
    return x


@functools.lru_cache(maxsize=256)  # a mixture has a few for each component
def keys_of(seed: int, epoch: int) -> np.ndarray:  # -> (ROUNDS,) uint64
    return np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
