"""Kernels whose warps have different tasks: barriers of some warps, and what each warp knows of the others.

Warps meet at numbered barriers and mbarriers, so that no count of barriers tells which access came first. Each warp
counts its own epochs instead, and knows the last epoch of every other warp that happened before its next instruction:
it tells a barrier when it arrives, and learns when it passes (vector clocks).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from fasttrain_kernels.testing.executed.hazards import Hazards
from fasttrain_kernels.testing.executed.memory import Fault
from fasttrain_kernels.testing.executed.values import I64, Array

if TYPE_CHECKING:
    from fasttrain_kernels.testing.executed.lanes import Lanes


class WarpClocks:
    """Epochs of the warps of a block, and what each knows of the others'."""

    def __init__(self, warps: int) -> None:
        self.epoch = np.ones(warps, I64)
        self.known = np.zeros((warps, warps), I64)

    def tell(self, warp: int) -> Array:
        """What a warp passes on; what it does from now on is not part of it."""
        known = self.known[warp].copy()
        known[warp] = self.epoch[warp]
        self.epoch[warp] += 1
        return known

    def learn(self, warp: int, known: Array) -> None:
        np.maximum(self.known[warp], known, out=self.known[warp])


class ClockedHazards(Hazards):
    """Of the shared memory of one block. An access is of one warp, and a conflict if the other's epoch is unknown."""

    def __init__(self, granules: int, clocks: WarpClocks) -> None:
        super().__init__(granules)
        self.clocks = clocks
        self.read = np.zeros((granules, len(clocks.epoch)), I64)  # the last epoch of each warp

    def conflict(self, before: Any, who: Any) -> Any:
        me, epoch, warp = _warp(who), before >> 8 & 0xFFFFFFFF, before & 0xFF
        return (before != 0) & (warp != me) & (epoch > self.clocks.known[me][warp])

    def note_read(self, at: Array, who: Array) -> Any:
        self.read[at, _warp(who)] = self.clocks.epoch[_warp(who)]
        return self.conflict(self.written[at], who)

    def note_write(self, at: Array, who: Array) -> tuple[Any, Any]:
        unknown = self._unknown_reads(at, who)
        writes = self.conflict(self.written[at], who)
        self.written[at] = np.broadcast_to(who, at.shape)
        return unknown.any(-1), writes

    def readers(self, at: Array, who: Array) -> Array:
        warp = self._unknown_reads(at, who).argmax(-1)
        return np.take_along_axis(self.read[at], warp[..., None], -1)[..., 0] << 8 | warp

    def _unknown_reads(self, at: Array, who: Array) -> Array:
        me = _warp(who)
        unknown = self.read[at] > self.clocks.known[me]
        unknown[..., me] = False
        return unknown


def _warp(who: Array) -> int:
    return int(who.flat[0]) & 0xFF


def pass_barriers(groups: list[Lanes], clocks: WarpClocks) -> bool:
    """Let the warps go on that wait at a barrier which all of its threads have reached; returns if there are any."""
    waiting: dict[int, list[Lanes]] = defaultdict(list)
    for group in groups:
        if not group.done and group.blocked:
            waiting[group.barrier[0]].append(group)
    passed = False
    for number, arrived in waiting.items():
        threads = {group.barrier[1] for group in arrived}
        if len(threads) > 1 or 32 * len(arrived) > min(threads):
            raise Fault(
                f"barrier {number}: {32 * len(arrived)} threads wait for {', '.join(map(str, sorted(threads)))}"
            )
        if 32 * len(arrived) == min(threads):
            known = np.maximum.reduce([clocks.tell(int(group.warp[0])) for group in arrived])
            for group in arrived:
                clocks.learn(int(group.warp[0]), known)
                group.set_epoch()
                group.release()
            passed = True
    return passed
