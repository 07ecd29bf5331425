"""Bytes between memory and the L2 of a GPU, if it has the card's size and is empty before each launch.

Distinct bytes (`unique`) are those of a cache that holds all that a launch touches: gigabytes, in a large matmul.
Which block a GPU's L2 evicts is not documented, so there are two figures:

    perfect   the block that will be needed last (Belady's rule): no cache of that size moves less
    LRU       the least recently used block: a loop over more than the cache holds finds nothing in it

Programs start in the order of their numbers, as many at a time as the card holds, and advance in step: one fetch serves
all that need a block at that time.

    matmuls     (Tiling) a cache of blocks: panels of both operands, in chunks along the dimension that is summed over,
                and the tiles of the result
    attention   distinct bytes: keys and values of the heads in flight fit every cache but the smallest
    the rest    programs stream through parts of their own; if one reads its part again, what the parts of all programs
                in flight have beyond the cache's size comes from memory again, and with LRU all of it
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from bench.static.gpus import Card
from fasttrain_kernels.testing import Traffic

if TYPE_CHECKING:
    from bench.static.counts import Counts

_CHUNK = 1024  # elements of D: finer ones change the figures by less than 0.5 %, and take longer
_PANELS = 1 << 20  # of an operand, at most
_NEVER = 1 << 60

Rule = Literal["perfect", "lru"]


@dataclass(frozen=True)
class Operand:
    """A matrix of D columns, of whose rows a tile needs those of its own rows (side 0) or columns (side 1)."""

    name: str
    side: int
    itemsize: int
    added_to: bool = False  # read and written; otherwise only read


@dataclass(frozen=True)
class Result:
    """The output of a matmul, written as a tile at the end of each program; read before if it is added to."""

    names: tuple[str, ...]  # of the launch's arguments
    itemsize: int
    added_to: bool = False


@dataclass(frozen=True)
class Tiling:
    """A launch that computes a matrix (M, N) in tiles, one a program, each in loops over D."""

    M: int
    N: int
    D: int
    tile: tuple[int, int]
    loops: tuple[tuple[Operand, ...], ...]  # what each loop goes through
    group: int  # rows of tiles that are taken together, column by column, before the next rows
    by_columns: bool = False  # the same with columns of tiles
    result: Result | None = None  # if it goes to memory

    @property
    def covered(self) -> set[str]:
        """Arguments whose bytes are those of the operands and the result."""
        return {operand.name for loop in self.loops for operand in loop} | set(self.result.names if self.result else ())

    @property
    def blocks(self) -> tuple[int, int]:
        return -(-self.M // self.tile[0]), -(-self.N // self.tile[1])

    def order(self) -> list[tuple[int, int]]:
        """The tile of each program, as (row, column)."""
        outer, inner = reversed(self.blocks) if self.by_columns else self.blocks
        order = [
            (i, j)
            for first in range(0, outer, self.group)
            for j in range(inner)
            for i in range(first, min(first + self.group, outer))
        ]
        return [(i, j) for j, i in order] if self.by_columns else order

    def rows(self, side: int, panel: int) -> int:
        """Rows of a panel: the last one may be short."""
        return min(self.tile[side], (self.M, self.N)[side] - panel * self.tile[side])


def memory_bytes(counts: Counts, card: Card, rule: Rule, *, programs: int, resident: int) -> int:
    """Bytes of a launch; `resident` programs are on one multiprocessor at a time."""
    concurrent = resident * card.multiprocessors
    if counts.tilings:
        covered = counts.tilings[0].covered
        rest = sum(traffic.unique for name, traffic in counts.arguments.items() if name not in covered)
        return rest + min(_tiled(tiling, concurrent, card.l2_bytes, rule) for tiling in counts.tilings)
    if counts.flops:
        return counts.unique
    share = min(concurrent / programs, 1.0)
    return sum(_streamed(traffic, share, card.l2_bytes, rule) for traffic in counts.arguments.values())


def _streamed(traffic: Traffic, in_flight: float, size: int, rule: Rule) -> int:
    """Bytes of an argument, a share `in_flight` of which the programs work on at a time."""
    distinct = traffic.unique - min(traffic.stored, traffic.unique)  # read; what is written is written once
    again, held = max(traffic.loaded - distinct, 0), distinct * in_flight
    missed = max(1 - size / held, 0.0) if held else 0.0
    return traffic.unique + (round(again * missed) if rule == "perfect" else again * (missed > 0))


@cache
def _tiled(tiling: Tiling, concurrent: int, size: int, rule: Rule) -> int:
    return {"perfect": through, "lru": through_lru}[rule](list(accesses(tiling, concurrent)), size)


class Access(NamedTuple):
    """An access of a program to a block."""

    block: int
    size: int  # bytes
    written: bool = False
    read: bool = True


def accesses(tiling: Tiling, concurrent: int) -> Iterator[Access]:
    """Yield the accesses of a launch to L2, in order; programs of a wave share those to the same block."""
    order, chunks = tiling.order(), -(-tiling.D // _CHUNK)
    numbers = {name: i for i, name in enumerate(sorted({o.name for loop in tiling.loops for o in loop}))}
    for start in range(0, len(order), concurrent):
        wave = order[start : start + concurrent]
        panels = [sorted({tile[side] for tile in wave}) for side in (0, 1)]
        for loop in tiling.loops:
            for chunk in range(chunks):
                columns = min(_CHUNK, tiling.D - chunk * _CHUNK)
                for operand in loop:
                    for panel in panels[operand.side]:
                        block = (numbers[operand.name] * _PANELS + panel) * chunks + chunk
                        size = tiling.rows(operand.side, panel) * columns * operand.itemsize
                        yield Access(block, size, operand.added_to)
        if tiling.result:
            for number, (row, column) in enumerate(wave, start):
                size = tiling.rows(0, row) * tiling.rows(1, column) * tiling.result.itemsize
                yield Access(-1 - number, size, written=True, read=tiling.result.added_to)


def through(asked: Sequence[Access], size: int) -> int:
    """Bytes moved between memory and a cache that evicts the block that is needed last."""
    following = _following([access.block for access in asked])
    held: dict[int, tuple[int, int, bool]] = {}  # block -> when it is needed again, bytes, written
    latest: list[tuple[int, int]] = []  # a heap of (-when, block); entries of the past are skipped
    used = moved = 0
    for (block, length, written, read), again in zip(asked, following, strict=True):
        if block in held:
            written |= held[block][2]
        else:
            used += length
            moved += length * read
        held[block] = (again, length, written)
        heapq.heappush(latest, (-again, block))
        while used > size:
            when, victim = heapq.heappop(latest)
            if victim in held and held[victim][0] == -when:
                _, length, dirty = held.pop(victim)
                used -= length
                moved += length * dirty
    return moved + sum(length for _, length, dirty in held.values() if dirty)


def through_lru(asked: Sequence[Access], size: int) -> int:
    """Bytes moved by a cache that evicts the least recently used block."""
    held: OrderedDict[int, tuple[int, bool]] = OrderedDict()  # block -> bytes, written; the last used at the end
    used = moved = 0
    for block, length, written, read in asked:
        if block in held:
            written |= held.pop(block)[1]
        else:
            used += length
            moved += length * read
        held[block] = (length, written)
        while used > size:
            _, (length, dirty) = held.popitem(last=False)
            used -= length
            moved += length * dirty
    return moved + sum(length for length, dirty in held.values() if dirty)


def _following(blocks: Sequence[int]) -> list[int]:
    """Return, for each access, the number of the next one to the same block."""
    array = np.asarray(blocks)
    by_block = np.argsort(array, kind="stable")
    same = array[by_block[1:]] == array[by_block[:-1]]
    following = np.full(len(array), _NEVER)
    following[by_block[:-1][same]] = by_block[1:][same]
    return following.tolist()
