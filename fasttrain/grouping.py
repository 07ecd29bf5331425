"""Neighbours that are handled together, as many as fit."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def grouped(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Items in order, in groups whose sizes add up to at most so much; one that is larger is alone."""
    group, held = list[Item](), 0
    for item in items:
        if group and held + size(item) > most:
            yield group
            group, held = [], 0
        group.append(item)
        held += size(item)
    if group:
        yield group
