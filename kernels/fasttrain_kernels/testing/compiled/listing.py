"""A compiled kernel as a list of instructions, whatever the vendor: where it loops, and what it adds up to."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttrain_kernels.testing.compiled.fences import unfenced_matmuls
from fasttrain_kernels.testing.compiled.metadata import KernelMetadata
from fasttrain_kernels.testing.targets import Target

_SMALL_BYTES = 1024  # what 64 lanes move in one 128-bit access; with less, some lanes have nothing to do


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: Triton's metadata, and the texts and binary of its stages by extension."""

    triton_metadata: Any
    stages: dict[str, Path]


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly."""

    opcode: tuple[str, ...]  # ("LDG", "E", "128")
    operands: str
    address: int
    jump: int | None  # address
    ends: bool  # control never reaches the next instruction


@dataclass
class InstructionCounts:
    """Counts of a listing, by kind of instruction."""

    loads: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)
    copies: Counter[int] = field(default_factory=Counter)
    matrix: Counter[str] = field(default_factory=Counter)
    tma: int = 0
    special: int = 0
    barriers: int = 0
    instructions: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    loop_spills: int = 0

    def spill(self, bits: int, *, store: bool, in_loop: bool) -> None:
        self.spill_stores += bits // 8 * store
        self.spill_loads += bits // 8 * (not store)
        self.loop_spills += bits // 8 * in_loop

    def metadata(self, target: Target, binary: Binary, *, registers: int) -> KernelMetadata:
        compiled = binary.triton_metadata
        return KernelMetadata(
            kernel=compiled.name,
            target=target.name,
            num_warps=getattr(compiled, "total_num_warps", None) or compiled.num_warps,  # more if warp-specialised
            registers=registers,
            shared=compiled.shared,  # all of it is dynamic; what cubins call static is the system's reserved 1 KiB
            tensor_memory=getattr(compiled, "tmem_size", None) or 0,
            dots=_dots(binary),
            small=_small_accesses(target, binary),
            spill_stores=self.spill_stores,
            spill_loads=self.spill_loads,
            loop_spills=self.loop_spills,
            instructions=self.instructions,
            loads=dict(self.loads),
            stores=dict(self.stores),
            copies=dict(self.copies),
            tma=self.tma,
            matrix=dict(self.matrix),
            special=self.special,
            barriers=self.barriers,
            unfenced=unfenced_matmuls(binary.stages["ptx"].read_text()) if "ptx" in binary.stages else 0,
        )


def in_loops(listing: Sequence[Instruction]) -> list[bool]:
    """Return, for every instruction, whether control can come back to it.

    A jump backwards alone proves nothing: compilers place rarely taken paths at the end and return from there.
    """
    index = {instruction.address: i for i, instruction in enumerate(listing)}
    targets = {index[i.jump] for i in listing if i.jump in index}
    starts = sorted({0} | targets | {i + 1 for i, x in enumerate(listing) if x.jump is not None or x.ends})
    starts = [start for start in starts if start < len(listing)]
    block_of = {start: block for block, start in enumerate(starts)}
    spans = list(zip(starts, [*starts[1:], len(listing)], strict=True))
    successors = []  # bit masks of blocks
    for block, (_, stop) in enumerate(spans):
        last = listing[stop - 1]
        mask = 0 if last.ends or block + 1 == len(spans) else 1 << (block + 1)
        if last.jump in index and index[last.jump] != stop - 1:  # the self-jump after EXIT is padding
            mask |= 1 << block_of[index[last.jump]]
        successors.append(mask)
    cyclic = [bool(mask >> block & 1) for block, mask in enumerate(_closure(successors))]
    return [inside for inside, (start, stop) in zip(cyclic, spans, strict=True) for _ in range(start, stop)]


def _closure(successors: list[int]) -> list[int]:
    """Return the blocks that each block leads to (Warshall's algorithm on bit masks)."""
    reachable = list(successors)
    for middle in range(len(reachable)):
        for block, mask in enumerate(reachable):
            if mask >> middle & 1:
                reachable[block] = mask | reachable[middle]
    return reachable


# The source, in Triton's own IR

_ACCESS = re.compile(r"\btt\.(?:load|store) .*? : (?:tensor<((?:\d+x)+))?!tt\.ptr<[a-z]+(\d+)")


def _dots(binary: Binary) -> int:
    return len(re.findall(r"\btt\.dot(?:_scaled)?\b", binary.stages["ttir"].read_text()))


def _small_accesses(target: Target, binary: Binary) -> int:
    """Accesses of less than _SMALL_BYTES in Triton's own IR, each counted as often as the lanes have to repeat it."""
    lanes = binary.triton_metadata.num_warps * target.warp_size
    small = 0
    for shape, bits in _ACCESS.findall(binary.stages["ttir"].read_text()):
        elements = math.prod(int(length) for length in shape.split("x") if length)
        if elements * int(bits) < 8 * _SMALL_BYTES:
            small += -(-elements // lanes)
    return small
