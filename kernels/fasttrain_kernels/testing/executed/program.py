"""A kernel with every instruction translated, ready to be executed."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass
from enum import Enum

import numpy as np

from fasttrain_kernels.testing.executed import accesses, arithmetic, mbarriers, tcgen05, tma, warps, wgmma
from fasttrain_kernels.testing.executed.ptx import Operand, PtxInstruction, PtxKernel, Unsupported
from fasttrain_kernels.testing.executed.translate import Step, translate
from fasttrain_kernels.testing.executed.values import KINDS, Array

RULES = (accesses, arithmetic, mbarriers, tcgen05, tma, warps, wgmma)  # importing them registers their rules


class FlowKind(Enum):
    """How an instruction moves the lanes that execute it."""

    LANE = "each for itself"
    WARP = "the lanes of a warp wait for each other"
    ALL = "the lanes of four warps wait for each other"
    BRANCH = "jumps"
    SWITCH = "jumps by a table"
    BARRIER = "waits for the block"
    END = "ends"


@dataclass(frozen=True)
class TranslatedBarrier:
    """Which barrier: a number, or the register that holds it; and the threads that meet there."""

    number: int
    register: int | None
    threads: int


@dataclass(frozen=True)
class TranslatedInstruction:
    """One instruction. Registers are numbered by slots."""

    kind: FlowKind
    execute: Step | None  # of control flow: none
    target: int  # of a branch; of a switch, the register with its index
    table: Array | None  # of a switch: where it jumps to
    barrier: TranslatedBarrier | None
    guard: int | None
    negated: bool
    sources: frozenset[int]
    targets: frozenset[int]
    critical: frozenset[int]  # sources that are an address, or leave the block: they may not be undefined
    moves: bool  # values, and does nothing with them
    select: tuple[int | None, int | None, int] | None  # of selp: two registers, or constants, and the predicate


class ExecutableKernel:
    """A kernel, translated once and launched often."""

    def __init__(self, kernel: PtxKernel) -> None:
        self.kernel = kernel
        self.slots = {name: slot for slot, name in enumerate(kernel.registers)}
        # Warps have different tasks: each of them is scheduled for itself, one block at a time
        barriers = [self._barrier(i) for i in kernel.code if _kind(i) is FlowKind.BARRIER]
        self.specialised = any(barrier.threads != kernel.threads for barrier in barriers)
        self.bits = list(kernel.registers.values())
        self.steps = [self._translate(instruction) for instruction in kernel.code]
        self.granule = min([16, *(_shared_width(i) for i in kernel.code)])  # of races in shared memory
        # Blocks may not diverge from each other
        self.one_block = self.specialised or any(step.kind is FlowKind.ALL for step in self.steps)

    def replaced(self, at: int, instruction: PtxInstruction) -> ExecutableKernel:
        """The kernel with another instruction in one place."""
        found = copy(self)
        found.steps = [*self.steps[:at], self._translate(instruction), *self.steps[at + 1 :]]
        return found

    def _translate(self, instruction: PtxInstruction) -> TranslatedInstruction:
        kind, execute, target, table, barrier = _kind(instruction), None, -1, None, None
        guard = self.slots[instruction.guard] if instruction.guard else None
        if kind is FlowKind.BRANCH:
            target = self.kernel.destination(instruction)
        elif kind is FlowKind.SWITCH:
            index, name = instruction.operands
            target, table = self.slots[index.text], np.array(self.kernel.jump_table(instruction, name.text))
        elif kind is FlowKind.BARRIER:
            barrier = self._barrier(instruction)
        elif kind is not FlowKind.END:
            execute = translate(self.kernel, self.slots, instruction)
        return TranslatedInstruction(
            kind, execute, target, table, barrier, guard, instruction.guard_negated, self._sources(instruction),
            self._targets(instruction), self._critical(instruction), instruction.opcode.startswith("mov"),
            self._select(instruction),
        )  # fmt: skip

    def _barrier(self, instruction: PtxInstruction) -> TranslatedBarrier:
        number, *threads = instruction.operands
        if instruction.guard or any(operand.kind != "immediate" for operand in threads):
            raise Unsupported(f"{instruction}: {', '.join(o.text for o in instruction.operands)}")
        slot = self.slots[number.text] if number.kind == "register" else None
        return TranslatedBarrier(number.value, slot, threads[0].value if threads else self.kernel.threads)

    def _sources(self, instruction: PtxInstruction) -> frozenset[int]:
        first_is_source = instruction.opcode.startswith(("st", "red", "bra", "brx", "bar"))
        found: set[int] = set()
        for position, operand in enumerate(instruction.operands):
            if position or first_is_source or operand.kind == "address":
                found |= self._registers(operand)
        return frozenset(found)

    def _targets(self, instruction: PtxInstruction) -> frozenset[int]:
        if not instruction.operands or instruction.opcode.startswith(("st", "red", "bra", "brx", "bar", "wgmma")):
            return frozenset()
        first = instruction.operands[0]
        return frozenset() if first.kind == "address" else frozenset(self._registers(first))

    def _select(self, instruction: PtxInstruction) -> tuple[int | None, int | None, int] | None:
        if not instruction.opcode.startswith("selp"):
            return None
        a, b, predicate = instruction.operands[1:]
        return self.slots.get(a.text), self.slots.get(b.text), self.slots[predicate.text]

    def _critical(self, instruction: PtxInstruction) -> frozenset[int]:
        if re.match(r"st\..*global|atom|red\.|tcgen05\.mma|wgmma\.mma|mbarrier|cp\.async", instruction.opcode):
            return self._sources(instruction)
        addresses = (operand for operand in instruction.operands if operand.kind == "address")
        return frozenset(slot for address in addresses for slot in self._registers(address))

    def _registers(self, operand: Operand) -> set[int]:
        if operand.kind == "register":
            return {self.slots[operand.text]}
        below = [*operand.parts, *([operand.base] if operand.base else [])]
        return set().union(*(self._registers(part) for part in below))


def _kind(instruction: PtxInstruction) -> FlowKind:
    words = instruction.opcode.split(".")
    if instruction.opcode in ("bra", "bra.uni"):
        return FlowKind.BRANCH
    if instruction.opcode == "brx.idx":
        return FlowKind.SWITCH
    if words[0] in ("ret", "exit"):
        return FlowKind.END
    if words[0] in ("bar", "barrier") and words[-1] in ("sync", "aligned") and "warp" not in words:
        return FlowKind.BARRIER
    if words[0] == "wgmma":
        return FlowKind.ALL
    collective = ("shfl", "redux", "vote", "elect", "ldmatrix", "stmatrix", "mma", "tcgen05", "bar")
    return FlowKind.WARP if words[0] in collective and "sync" in words else FlowKind.LANE


def _shared_width(instruction: PtxInstruction) -> int:
    """Bytes of a plain access to shared memory."""
    words = instruction.opcode.split(".")
    if words[0] in ("ld", "st", "atom", "red") and any(word.startswith("shared") for word in words):
        vector = next((int(word[1:]) for word in words if re.fullmatch(r"v\d", word)), 1)
        return KINDS[words[-1]].bits // 8 * vector
    if re.match(r"cp\.async\.c[ag]", instruction.opcode):
        return instruction.operands[2].value
    if words[0] == "tensormap":
        return 4
    return 16
