"""The resources of a compiled kernel.

All counts are static: an instruction in a loop counts once. `loop_spills` says what is paid for in every round.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fasttrain_kernels.testing.targets import Occupancy, Target, occupancy, target_named

_REPLICAS = 4  # of an access in the binary: software pipelining repeats it before the loop, once per stage


@dataclass(frozen=True, kw_only=True)
class KernelMetadata:
    """One kernel in one specialisation for one target. Bytes are per block (shared) or per lane (spills)."""

    kernel: str
    target: str
    num_warps: int
    registers: int  # per lane; AMD: VGPRs, accumulation registers included
    spill_stores: int
    spill_loads: int
    loop_spills: int  # the part of both that lies in a loop
    shared: int
    tensor_memory: int  # columns
    instructions: int
    loads: dict[int, int]  # bits per lane -> global loads to registers
    stores: dict[int, int]  # bits per lane -> global stores
    copies: dict[int, int]  # bits per lane -> asynchronous copies from global to shared memory
    tma: int  # bulk copies by the tensor memory accelerator
    dots: int  # matrix multiplications in the kernel's source
    small: int  # accesses in the source that are too small to be wide: one value per row, a short weight
    matrix: dict[str, int]  # "HMMA", "HGMMA", "UTCHMMA", "MFMA", ... -> tensor core instructions
    special: int  # exp, log, rsqrt, ...: a quarter of the rate of an addition, or less
    barriers: int  # of the whole block
    unfenced: int = 0  # matmuls that may read what cp.async delivered without a proxy fence (fences.py)

    @property
    def limits(self) -> Target:
        return target_named(self.target)

    @property
    def occupancy(self) -> Occupancy:
        return occupancy(
            self.limits,
            num_warps=self.num_warps,
            registers=self.registers,
            shared=self.shared,
            tensor_memory=self.tensor_memory,
        )

    @property
    def fits(self) -> bool:
        """Whether one block can run at all."""
        return self.occupancy.blocks > 0

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0

    @property
    def narrow_bulk(self) -> int:
        """Global accesses of less than 128 bits that no small access in the source explains."""
        narrow = sum(
            count
            for accesses in (self.loads, self.stores, self.copies)
            for bits, count in accesses.items()
            if bits < 128
        )
        return max(0, narrow - _REPLICAS * self.small)

    @property
    def wide_share(self) -> float:
        """The part of the global bytes that moves in accesses of 128 bits or more (bulk copies count as such)."""
        widths: Counter[int] = Counter({128: self.tma})
        for accesses in (self.loads, self.stores, self.copies):
            widths.update(accesses)
        total = sum(bits * count for bits, count in widths.items())
        return sum(bits * count for bits, count in widths.items() if bits >= 128) / total if total else 1.0
