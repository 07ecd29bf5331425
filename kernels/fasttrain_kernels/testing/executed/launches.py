"""What a launch executed, and what it found."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_CLASSES = (  # the first pattern that an opcode matches names its class
    ("matmul", r"(mma|wgmma\.mma_async|tcgen05\.mma)\b"),
    ("global memory", r"(ld|st)\.[\w.:]*global|ld\.param"),
    ("shared memory", r"(ld|st)\.[\w.:]*shared|ldmatrix|stmatrix"),
    ("tensor memory", r"tcgen05\.(ld|st)\b"),
    ("asynchronous copy", r"cp\.async\.c[ag]"),
    ("bulk copy", r"cp\.async\.bulk\.tensor"),
    ("atomic", r"(atom|red)\b"),
    ("barrier", r"(bar|barrier)\.sync"),
    ("wait, fence", r"cp\.async|wgmma|tcgen05|mbarrier|fence|membar|griddepcontrol|tensormap"),
    ("shuffle, vote", r"shfl|redux|vote|elect|bar\.warp"),
    ("special function", r"(ex2|lg2|sqrt|rsqrt|rcp|sin|cos|tanh)\.approx|div\.(full|approx)"),
    ("control", r"bra|ret|exit"),
    ("conversion, move", r"mov|cvt|selp"),
    ("comparison", r"setp"),
    ("float arithmetic", r"\w+\.(?:\w+\.)*(b?f16(x2)?|f32(x2)?|f64)$"),
    ("integer arithmetic", r""),
)


@dataclass
class ExecutedLaunch:
    """One execution of a compiled kernel over its grid. Instructions are counted per warp."""

    kernel: str
    grid: tuple[int, int, int] = (0, 0, 0)
    threads: int = 0  # of a block
    seconds: float = 0.0
    opcodes: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0  # of global memory
    bytes_written: int = 0
    bytes_atomic: int = 0
    mma_flops: int = 0  # of tensor-core instructions: two per multiply and add
    bank_accesses: int = 0  # to shared memory, if no two words of a bank met
    bank_conflicts: int = 0  # accesses beyond that
    # Findings, by instruction: how many lanes, granules or reads
    uninitialised: Counter[str] = field(default_factory=Counter)  # reads of shared or tensor memory nobody wrote
    unfenced: Counter[str] = field(default_factory=Counter)  # operands of wgmma, tcgen05 without a proxy fence
    collisions: Counter[str] = field(default_factory=Counter)  # lanes of a warp store different values to one address
    early: Counter[str] = field(default_factory=Counter)  # registers of asynchronous instructions before their wait
    unfinished: Counter[str] = field(default_factory=Counter)  # asynchronous work that nobody waited for

    @property
    def instructions(self) -> int:
        return self.opcodes.total()

    @property
    def classes(self) -> Counter[str]:
        """Instructions by class."""
        found: Counter[str] = Counter()
        for opcode, count in self.opcodes.items():
            found[next(name for name, pattern in _CLASSES if re.match(pattern, opcode))] += count
        return found

    @property
    def barriers(self) -> int:
        """Barriers of a block, summed over its warps."""
        return self.classes["barrier"]

    @property
    def findings(self) -> list[str]:
        """Everything that hardware leaves undefined and this execution decided somehow."""
        kinds = {
            "reads memory that nobody wrote": self.uninitialised,
            "reads through the asynchronous proxy without a fence": self.unfenced,
            "lanes store different values to one address": self.collisions,
            "touches registers before the wait": self.early,
            "ends too early": self.unfinished,
        }
        return [f"{kind}: {what} ({n}x)" for kind, counts in kinds.items() for what, n in counts.items()]

    def __str__(self) -> str:
        classes = ", ".join(f"{name} {count:,}" for name, count in self.classes.most_common())
        lines = [
            f"{self.kernel} {self.grid} x {self.threads} threads: {self.instructions:,} warp instructions, "
            f"{self.bytes_read:,} B read, {self.bytes_written:,} B written, {self.mma_flops:,} matmul FLOP, "
            f"{self.bank_conflicts:,} bank conflicts in {self.bank_accesses:,} accesses",
            f"  {classes}",
        ]
        return "\n".join([*lines, *(f"  {finding}" for finding in self.findings)])


class ExecutedLaunches(list[ExecutedLaunch]):
    """The launches of a `with execute()`, in order."""

    @property
    def findings(self) -> list[str]:
        return [f"{launch.kernel}: {finding}" for launch in self for finding in launch.findings]

    def __str__(self) -> str:
        return "\n".join(map(str, self))
