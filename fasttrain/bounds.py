"""Bounds of numbers: stated where a number is declared, as Annotated[int, Bounds(1, 9)]; checked before all else."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True)
class Bounds:
    """A range of numbers, with both ends. What is not finite is in none."""

    low: float
    high: float
    without: float | None = None  # the end that does not belong to it

    def __str__(self) -> str:
        if self.without is None:
            return f"from {self.low:_} to {self.high:_}"
        if self.without == self.low:
            return f"above {self.low:_} and at most {self.high:_}"
        return f"from {self.low:_} to below {self.high:_}"

    def problem(self, value: Any, kind: type) -> str:
        """What a value must be and is not; empty: it is. kind: int or float."""
        is_number = isinstance(value, Integral if kind is int else Real)
        if is_number and self.low <= value <= self.high and value != self.without:
            return ""
        return f"must be a {'whole' if kind is int else 'finite'} number {self}"


@cache
def bounds_of(section: Any) -> dict[str, tuple[Bounds, type]]:
    """The bounds of a dataclass's fields, by name, with int or float: what a field is, or consists of."""
    return {
        name: (bounds, int if get_args(hint)[0] in (int, int | None) else float)
        for name, hint in get_type_hints(section, include_extras=True).items()
        for bounds in getattr(hint, "__metadata__", ())
    }


class Bounded:
    """A dataclass whose numbers are checked when it is made. In errors, lr of OptimConfig is optim.lr."""

    def __post_init__(self) -> None:
        self.check_bounds(type(self).__name__.removesuffix("Config").lower())

    def check_bounds(self, section: str) -> None:
        own: Any = type(self)
        for name, (bounds, kind) in bounds_of(own).items():
            for value in _numbers(getattr(self, name)):
                if problem := bounds.problem(value, kind):
                    raise ValueError(f"{section}.{name} ({value}) {problem}".removeprefix("."))


def _numbers(value: Any) -> Iterator[Any]:
    """Those of a field: one, those of a tuple, or none."""
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif value is not None:
        yield value
