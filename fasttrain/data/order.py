"""In which order a run sees the samples of its datasets: arithmetic, with no state and no table.

**Order of one dataset.** Sample g of a run (g = step * sequences of a step + place in the step) lies in epoch
g // size, at place g % size. Each epoch has a permutation of its own, computed for single places: a Feistel network
over pairs (left, right) with

    place = left * b + right,    left < a,  right < b,    a, b close to sqrt(size),  a * b >= size

whose rounds alternate left += F(right) mod a and right += F(left) mod b, F a keyed hash. A round can be undone, so that
the whole is a permutation of a * b places. A result >= size goes through again until it is below (cycle walking), which
makes it a permutation of `size` places; a * b < size + a, so that this is rare. Memory is O(1), at any size.

**Mixture.** Of g samples, a part with the share w of all weights has w * g, rounded so that parts add up to g and none
ever loses a sample: the heaviest part has round(w * g), the next one its share of what is left, and so on. Weights are
exact fractions, so that nothing drifts. This says how many samples of each part lie in a block of the run; a hash of
the place brings them into an irregular order within the block. Each part counts its own samples, through its own
epochs. A part that has reached its limit drops out, at a sample that is known in advance, and the others share its
place by their weights. Between two such samples lies a phase, in which the mixture stays as it is.
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

ROUNDS = 8  # 4 would do for 10,000 samples; 6 leave short epochs uneven (tests/fasttrain/data/test_order.py)


def samples_at(
    datasets: np.ndarray,  # (n,) int64
    numbers: np.ndarray,  # (n,) int64: of samples in the run of their dataset
    *,
    sizes: Sequence[int],  # of each dataset
    seeds: Sequence[int],
) -> np.ndarray:  # -> (n,) int64 below the sizes
    """The samples that have these numbers. All at once: on a few samples, a call of NumPy costs more than its work."""
    epochs, places = np.divmod(numbers, np.array(sizes)[datasets])
    orders, of_row = np.unique(epochs * len(sizes) + datasets, return_inverse=True)
    found = (divmod(order, len(sizes)) for order in orders.tolist())
    ciphers = np.hstack([cipher(sizes[dataset], seeds[dataset], epoch) for epoch, dataset in found])
    return walked(network, places, ciphers if len(orders) == 1 else ciphers[:, of_row])


def place_of(sample: int, *, size: int, seed: int, epoch: int) -> int:
    """The place of an epoch at which a sample comes."""
    return int(walked(network_back, np.array([sample]), cipher(size, seed, epoch))[0])


def cipher(size: int, seed: int, epoch: int) -> np.ndarray:  # -> (3 + ROUNDS, 1) uint64
    """The parameters of an epoch's permutation: size, a, b and the keys."""
    a = math.isqrt(size - 1) + 1
    return np.array([size, a, -(-size // a), *keys_of(seed, epoch)], np.uint64)[:, None]


Network = Callable[[np.ndarray, np.ndarray], np.ndarray]


def walked(network: Network, places: np.ndarray, ciphers: np.ndarray) -> np.ndarray:  # ciphers: each row's, or one
    """Send places through the network, and again as long as they are not below the size."""
    out = network(places.astype(np.uint64), ciphers)
    while (outside := out >= ciphers[0]).any():
        out[outside] = network(out[outside], ciphers if ciphers.shape[1] == 1 else ciphers[:, outside])
    return out.astype(np.int64)


def network(places: np.ndarray, ciphers: np.ndarray) -> np.ndarray:
    _, a, b, *keys = ciphers
    left, right = np.divmod(places, b)
    for number in range(0, ROUNDS, 2):
        left = (left + hashed(right, keys[number])) % a
        right = (right + hashed(left, keys[number + 1])) % b
    return left * b + right


def network_back(places: np.ndarray, ciphers: np.ndarray) -> np.ndarray:
    _, a, b, *keys = ciphers
    left, right = np.divmod(places, b)
    for number in range(ROUNDS - 2, -1, -2):
        right = (right + b - hashed(left, keys[number + 1]) % b) % b
        left = (left + a - hashed(right, keys[number]) % a) % a
    return left * b + right


def hashed(x: np.ndarray, key: np.uint64 | np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: each bit of the input changes each bit of the result half of the time.

    uint64 arrays wrap around silently, as meant here. 63 bits, so that half a place can be added without a wrap, which
    would break the permutation.
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


BLOCK = 64  # samples over which proportions are exact: few, for even steps, and enough for an irregular order
PLACES = 2**62  # in place of an epoch: the key of the order within blocks


class MixturePart(NamedTuple):
    """A dataset of a mixture, counted in samples."""

    weight: Fraction
    limit: int | None = None  # over the whole run
    used: int = 0  # before this mixture began


class Places(NamedTuple):
    """A segment of the run: the part that each sample is of, and its number among the part's own."""

    parts: np.ndarray  # (n,) int64
    numbers: np.ndarray  # (n,) int64


class Mixture:
    """`at(first, count)`, for any segment of a run."""

    def __init__(self, parts: Sequence[MixturePart], *, seed: int) -> None:
        self._phases: list[_Phase] = []
        self.stops: list[int | None] = [None] * len(parts)
        """Samples after which each part has reached its limit; None: never."""
        self._used = [part.used for part in parts]
        key = keys_of(seed, PLACES)[0]
        first, used = 0, self._used
        while True:
            active = [i for i, part in enumerate(parts) if part.limit is None or used[i] < part.limit]
            for i in set(range(len(parts))) - set(active):
                self.stops[i] = first if self.stops[i] is None else self.stops[i]
            if not active:
                break
            phase = _Phase(first=first, stop=None, used=used, shares=_shares(parts, active), key=key)
            self._phases.append(phase)
            total = sum(parts[i].weight for i in active)
            limits = [(i, parts[i].weight / total, limit) for i in active if (limit := parts[i].limit) is not None]
            stops = [_overrun(phase, *limited) - 1 for limited in limits]
            if not stops:
                break
            phase.stop = first = min(stops)
            used = phase.used_at(first)

    @property
    def length(self) -> int | None:
        """Samples until every part has reached its limit; None: endless."""
        return self._phases[-1].stop if self._phases else 0

    def at(self, first: int, count: int) -> Places:
        """Samples `first` to `first + count` of the run."""
        if self.length is not None and first + count > self.length:
            raise ValueError(f"data: every part of the mixture has reached its limit after {self.length} samples")
        found, stop = [], first + count
        for phase in self._phases:
            begin, end = max(first, phase.first), stop if phase.stop is None else min(stop, phase.stop)
            if begin < end:
                found.append(phase.at(begin, end))
        return found[0] if len(found) == 1 else Places(*map(np.concatenate, zip(*found, strict=True)))

    def used_at(self, sample: int) -> list[int]:
        """How many samples of each part were used before a sample of the run, and before the run."""
        if not self._phases:
            return self._used
        phase = next(phase for phase in reversed(self._phases) if phase.first <= sample)
        block = phase.first + (sample - phase.first) // BLOCK * BLOCK
        if sample == phase.stop or sample == block:
            return phase.used_at(sample)
        since = np.bincount(phase.at(block, sample).parts, minlength=len(self.stops))
        return [used + int(more) for used, more in zip(phase.used_at(block), since, strict=True)]

    def sample_of(self, part: int, number: int, stop: int) -> int | None:
        """Where in the run a part's own sample comes; None: not among the first `stop`, or before this mixture."""
        if not self._used[part] <= number < self.used_at(stop)[part]:
            return None
        return bisect_right(range(stop), number, key=lambda sample: self.used_at(sample + 1)[part])


@dataclass(kw_only=True)
class _Phase:
    first: int  # sample of the run
    stop: int | None
    used: list[int]  # of each part, when it begins
    shares: list[tuple[int, int, int]]  # part, numerator, denominator: of what the parts before leave
    key: np.uint64

    def used_at(self, sample: int) -> list[int]:
        """How many samples of each part were used at the end of a block."""
        used, rest = list(self.used), sample - self.first
        for part, above, below in self.shares:
            taken = (2 * above * rest + below) // (2 * below)  # rounded
            used[part] += taken
            rest -= taken
        return used

    def at(self, first: int, stop: int) -> Places:
        if len(self.shares) == 1:  # the usual run has one dataset
            only = self.shares[0][0]
            numbers = self.used[only] + np.arange(first, stop) - self.first
            return Places(np.full_like(numbers, only), numbers)
        begin = self.first + (first - self.first) // BLOCK * BLOCK
        end = self.first - (self.first - stop) // BLOCK * BLOCK
        end = end if self.stop is None else min(end, self.stop)  # the last block is shorter
        used = np.array([self.used_at(sample) for sample in [*range(begin, end, BLOCK), end]])
        blocks, parts = len(used) - 1, used.shape[1]
        places = np.arange(begin, end)
        order = np.lexsort((hashed(places.astype(np.uint64), self.key), (places - begin) // BLOCK))
        of_part = np.repeat(np.tile(np.arange(parts), blocks), np.diff(used, axis=0).ravel())[order]
        numbers = np.empty_like(of_part)
        for part, *_ in self.shares:
            mine = np.flatnonzero(of_part == part)
            numbers[mine] = used[0, part] + np.arange(len(mine))
        asked = slice(first - begin, stop - begin)
        return Places(of_part[asked], numbers[asked])


def _shares(parts: Sequence[MixturePart], active: list[int]) -> list[tuple[int, int, int]]:
    """The heaviest first keeps the errors of rounding small."""
    left, shares = sum((parts[i].weight for i in active), Fraction(0)), []
    for i in sorted(active, key=lambda i: (-parts[i].weight, i)):
        shares.append((i, *(parts[i].weight / left).as_integer_ratio()))
        left -= parts[i].weight
    return shares


def _overrun(phase: _Phase, part: int, weight: Fraction, limit: int) -> int:
    """The first sample before which a part would have more than its limit, if the phase continued."""
    # Rounding is off by less than 1 for each part, so that the part has more by then.
    bound = phase.first + int((limit - phase.used[part] + len(phase.shares)) / weight) + 1
    return bisect_right(range(bound), limit, lo=phase.first, key=lambda sample: phase.used_at(sample)[part])
