"""mbarriers: objects in shared memory that count arrivals, and bytes of bulk copies, in phases.

A phase is complete when all expected arrivals and bytes have come. Asynchronous work that announces itself here is done
as late as possible, when somebody waits for the phase: see tcgen05 and tma.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fasttrain_kernels.testing.executed.memory import Fault
from fasttrain_kernels.testing.executed.translate import Mask, Step, Translator, chosen, full, rule
from fasttrain_kernels.testing.executed.values import U32, Array

if TYPE_CHECKING:
    from fasttrain_kernels.testing.executed.lanes import Lanes

_MANY_STALLS = 1_000


class Mbarrier:
    """One of them."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.phases = count, count, 0
        self.bytes = 0  # expected, and not there
        self.copies: list[Callable[[], None]] = []  # bulk copies under way
        self.told: Array | None = None  # by the warps that arrived: see specialised

    def arrive(self, number: int = 1) -> None:
        self.pending -= number
        self._complete()

    def expect(self, number: int) -> None:
        self.bytes += number
        self.arrive()

    def deliver(self, number: int) -> None:
        self.bytes -= number
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phases = self.count, self.phases + 1


class Mbarriers:
    """Those of a batch of blocks."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Mbarrier] = {}  # by block and address
        self.stalls = 0

    def at(self, block: int, address: int, what: str) -> Mbarrier:
        if (block, address) not in self.known:
            raise Fault(f"{what}: there is no mbarrier at {address}")
        return self.known[block, address]

    def unfinished(self) -> list[str]:
        copies = any(barrier.copies for barrier in self.known.values())
        return ["ends with bulk copies that nobody waited for"] if copies else []


@rule(r"mbarrier\.init\.shared::cta\.b64")
def _init(t: Translator, match: re.Match[str]) -> Step:
    address, count = t.address(t.operands[0]), t.constant(t.operands[1])

    def initialise(g: Lanes, m: Mask) -> None:
        lanes = chosen(g, m)
        if lanes.size:
            at = address(g)[lanes]
            for block, where in zip(g.block[lanes].tolist(), at.tolist(), strict=True):
                g.barriers.known[block, where] = Mbarrier(count)
            g.shared.store(at, np.zeros((lanes.size, 2), U32), 4, g.block[lanes], g.who[lanes], t.what)

    return initialise


@rule(r"mbarrier\.inval\.shared::cta\.b64")
def _invalidate(t: Translator, match: re.Match[str]) -> Step:
    address = t.address(t.operands[0])

    def invalidate(g: Lanes, m: Mask) -> None:
        at = address(g)
        for lane in chosen(g, m):
            block, where = int(g.block[lane]), int(at[lane])
            if g.barriers.at(block, where, t.what).copies or where in g.tensor.queues[block]:
                g.launch.unfinished[f"{t.what}: an arrival is still to come"] += 1
            del g.barriers.known[block, where]

    return invalidate


@rule(r"mbarrier\.arrive(\.expect_tx)?(?:\.release\.cta)?\.shared::cta\.b64")
def _arrive(t: Translator, match: re.Match[str]) -> Step:
    address = t.address(t.operands[1])
    given = t.source(t.operands[2], "u32") if len(t.operands) == 3 else None
    expects = match[1] is not None
    if t.operands[0].kind != "sink" or len(t.operands) > 3 or (expects and given is None):
        raise t.refuse()

    def arrive(g: Lanes, m: Mask) -> None:
        at, number = address(g), full(g, U32(1) if given is None else given(g)).tolist()
        for lane in chosen(g, m):
            barrier = g.barriers.at(int(g.block[lane]), int(at[lane]), t.what)
            if g.clocks is not None:
                told = g.clocks.tell(int(g.warp[lane]))
                barrier.told = told if barrier.told is None else np.maximum(barrier.told, told)
                g.set_epoch()
            if expects:
                barrier.expect(number[lane])
            else:
                barrier.arrive(number[lane])

    return arrive


@rule(r"mbarrier\.try_wait\.parity\.shared::cta\.b64")
def _try_wait(t: Translator, match: re.Match[str]) -> Step:
    write, address, parity = t.target(t.operands[0]), t.address(t.operands[1]), t.source(t.operands[2], "u32")

    def wait(g: Lanes, m: Mask) -> None:
        lanes, at, wanted, done = chosen(g, m), address(g), full(g, parity(g)) & U32(1), np.zeros(g.n, np.bool_)
        asked = {(int(g.block[i]), int(at[i]), int(wanted[i])) for i in lanes}
        for block, where, phase in asked:
            barrier = g.barriers.at(block, where, t.what)
            while barrier.phases % 2 == phase:
                if barrier.copies:
                    barrier.copies.pop(0)()
                elif not g.tensor.drain(block, where):
                    break
            if barrier.phases % 2 != phase:
                done |= (g.block == block) & (at == where) & (wanted == phase)
                if g.clocks is not None and barrier.told is not None:
                    g.clocks.learn(int(g.warp[0]), barrier.told)
        if done[lanes].any():
            g.barriers.stalls = 0
        else:
            g.stalled = True  # it is another's turn
            g.barriers.stalls += 1
            if g.barriers.stalls > _MANY_STALLS:
                raise Fault(f"{t.what}: waits forever")
        write(g, done, m)

    return wait
