"""Bytes and operations of a launch at full size, exactly, from interpreted runs at small sizes.

The bytes of a kernel are a polynomial in its sizes: so many per row, so many per program, so many in any case. A
case names the terms of that polynomial. Small runs give its value at some points, linear algebra over fractions the
value at full size. There are more points than terms: if the counts were not such a polynomial, the surplus would
contradict, and that is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from bench.static.cache import Tiling
from fasttrain_kernels.testing import Launch, Traffic


@dataclass(frozen=True)
class Counts:
    """The counts of one launch, by argument where they are bytes."""

    kernel: str
    arguments: dict[str, Traffic] = field(default_factory=dict)
    flops: int = 0  # on tensor cores
    elementwise: int = 0
    special: int = 0
    tilings: tuple[Tiling, ...] = ()  # of a matmul: possible orders of its tiles, if known

    @property
    def issued(self) -> int:
        return sum(traffic.moved for traffic in self.arguments.values())

    @property
    def unique(self) -> int:
        return sum(traffic.unique for traffic in self.arguments.values())


class NotPolynomial(ValueError):
    """The counts of small runs contradict the terms that the case names, or do not determine the full size."""


def extrapolate(
    points: Sequence[tuple[int, ...]],  # the terms of each small run
    values: Sequence[Sequence[int]],  # what each run counted
    full: tuple[int, ...],
) -> list[int]:
    """Return the counts of a run with the terms `full`."""
    basis: list[tuple[int, list[Fraction]]] = []  # (pivot, row) of [terms | values], rows reduced by those before
    surplus = 0
    for terms, counted in zip(points, values, strict=True):
        row = _reduced([*map(Fraction, terms), *map(Fraction, counted)], basis)
        pivot = next((i for i in range(len(terms)) if row[i]), None)
        if pivot is None:
            surplus += 1
            if any(row):
                raise NotPolynomial(f"counts at {terms} contradict those at the other points: {list(counted)}")
        else:
            basis.append((pivot, [x / row[pivot] for x in row]))
    if not surplus:
        raise NotPolynomial(f"{len(points)} points determine the terms and check nothing; add one")
    result = _reduced([*map(Fraction, full), *[Fraction(0)] * len(values[0])], basis)
    if any(result[: len(full)]):
        raise NotPolynomial(f"the small runs do not determine the counts at {full}")
    found = [-x for x in result[len(full) :]]
    if any(x.denominator != 1 or x < 0 for x in found):
        raise NotPolynomial(f"counts at {full} would not be whole numbers")
    return [int(x) for x in found]


def _reduced(row: list[Fraction], basis: Sequence[tuple[int, list[Fraction]]]) -> list[Fraction]:
    for pivot, other in basis:
        if factor := row[pivot]:
            row = [x - factor * y for x, y in zip(row, other, strict=True)]
    return row


def flat(launch: Launch) -> list[int]:
    """All figures of an interpreted launch, in a fixed order."""
    per_argument = [(t.loaded, t.stored, t.atomic, t.unique) for t in launch.arguments.values()]
    return [launch.flops, launch.elementwise, launch.special, *(n for four in per_argument for n in four)]


def unflat(kernel: str, names: Sequence[str], figures: Sequence[int]) -> Counts:
    """The counts whose figures these are."""
    traffic = {name: Traffic(*figures[3 + 4 * i : 7 + 4 * i]) for i, name in enumerate(names)}
    flops, elementwise, special = figures[:3]
    return Counts(kernel, traffic, flops, elementwise, special)
