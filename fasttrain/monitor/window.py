"""The last values of a series, and their quantiles: statistics that a few wild values cannot move."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

_QUARTILES = 1.349  # standard deviations between the quartiles of a normal distribution


class Window:
    """At most `size` values, the last ones. Kept in order too: a median costs a look, not a sort."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._ordered: list[float] = []
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        if len(self._values) == self._values.maxlen:
            del self._ordered[bisect_left(self._ordered, self._values[0])]
        self._values.append(value)
        insort(self._ordered, value)

    @property
    def is_full(self) -> bool:
        return len(self._values) == self._values.maxlen

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def spread(self) -> float:
        """The standard deviation, if the values were normal: from the quartiles."""
        return (self.quantile(0.75) - self.quantile(0.25)) / _QUARTILES

    def quantile(self, share: float) -> float:
        """Linear between neighbours."""
        place = share * (len(self._ordered) - 1)
        low = int(place)
        high = min(low + 1, len(self._ordered) - 1)
        return self._ordered[low] + (place - low) * (self._ordered[high] - self._ordered[low])

    def values(self) -> list[float]:
        """In the order of their arrival."""
        return list(self._values)
