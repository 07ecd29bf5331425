"""Who touched which part of a memory last, and which accesses conflict.

Two accesses conflict if one of them writes, and they come from different warps without a barrier between them, or
from different blocks. Barriers are counted: an identity is block << 40 | epoch << 8 | warp, with epoch >= 1 the number
of barriers that the block has passed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain_kernels.testing.executed.values import I64, Array

_SEVERAL_WARPS, _SEVERAL_BLOCKS = 0xFF, 1 << 62  # read a granule: what a later write is compared with


class Hazards:
    """The last writer and the readers of every granule."""

    def __init__(self, granules: int) -> None:
        self.written = np.zeros(granules, I64)
        self.read = np.zeros(granules, I64)

    def conflict(self, before: Any, who: Any) -> Any:
        other_block = (before >> 40) != (who >> 40)
        same_epoch = (before >> 8) == (who >> 8)
        return (before != 0) & (other_block | (same_epoch & (before != who)))

    def note_read(self, at: Array, who: Array) -> Any:  # (lanes, granules), (lanes, 1)
        """Return which reads conflict with an earlier write."""
        conflict = self.conflict(self.written[at], who)
        before = self.read[at]
        other_block = (before != 0) & ((before >> 40) != (who >> 40))
        mixed = (before >> 8 == who >> 8) & (before != who)
        value = np.where(other_block, who | _SEVERAL_BLOCKS, np.where(mixed, who | _SEVERAL_WARPS, who))
        self.read[at] = value
        seen = self.read[at]
        clash = seen != value  # another warp or block reads it in this very instruction
        if clash.any():
            blocks = clash & ((seen >> 40) != (value >> 40))
            self.read[at[clash]] = (value | _SEVERAL_WARPS)[clash]
            self.read[at[blocks]] = (value | _SEVERAL_BLOCKS)[blocks]
        return conflict

    def readers(self, at: Array, who: Array) -> Array:
        """Whom a write conflicts with; asked before it is noted."""
        return self.read[at]

    def note_write(self, at: Array, who: Array) -> tuple[Any, Any]:
        """Return which writes conflict with reads, and with earlier writes."""
        reads, writes = self.conflict(self.read[at], who), self.conflict(self.written[at], who)
        self.written[at] = np.broadcast_to(who, at.shape)
        return reads, writes


def identity(who: int) -> str:
    block, epoch, warp = (who & ~_SEVERAL_BLOCKS) >> 40, who >> 8 & 0xFFFFFFFF, who & 0xFF
    warps = "several warps" if warp == _SEVERAL_WARPS else f"warp {warp}"
    return f"{warps} of block {block} after {epoch - 1} barriers"
