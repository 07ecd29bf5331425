"""From an instruction to a function of lanes: operands, and the registry of rules.

A rule turns an instruction into a step, a function of a group of lanes and a mask (None: all of them). A spelling that
no rule lists is refused. Registers are arrays with one unsigned integer per lane, replaced and never changed in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from fasttrain_kernels.testing.executed.ptx import Operand, PtxInstruction, PtxKernel, Unsupported
from fasttrain_kernels.testing.executed.values import I64, KINDS, REGISTER, Array

if TYPE_CHECKING:
    from fasttrain_kernels.testing.executed.lanes import Lanes

Mask = Array | None
Step = Callable[["Lanes", Mask], None]
Source = Callable[["Lanes"], Any]  # values per lane, or one value
Write = Callable[["Lanes", Any, Mask], None]
Rule = Callable[["Translator", re.Match[str]], Step]

_FTZ = re.compile(r"\.ftz(?=\.)")
_RULES: dict[str, list[tuple[re.Pattern[str], Rule]]] = {}  # by the first word of the opcode


def rule(*spellings: str) -> Callable[[Rule], Rule]:
    """Register a rule for opcodes that match one of the patterns, without .ftz: see Translator.ftz."""

    def register(function: Rule) -> Rule:
        for spelling in spellings:
            word = re.match(r"\w+", spelling)
            assert word, spelling
            _RULES.setdefault(word[0], []).append((re.compile(spelling), function))
        return function

    return register


def translate(kernel: PtxKernel, slots: dict[str, int], instruction: PtxInstruction) -> Step:
    """The step of an instruction."""
    translator = Translator(kernel, slots, instruction)
    opcode = _FTZ.sub("", instruction.opcode)
    for spelling, function in _RULES.get(opcode.split(".")[0], []):
        if match := spelling.fullmatch(opcode):
            return function(translator, match)
    raise translator.refuse()


class Translator:
    """The operands of one instruction as functions of lanes."""

    def __init__(self, kernel: PtxKernel, slots: dict[str, int], instruction: PtxInstruction) -> None:
        self.kernel, self.slots, self.instruction = kernel, slots, instruction
        self.operands = instruction.operands
        self.what = str(instruction)
        self.ftz = bool(_FTZ.search(instruction.opcode))  # subnormals of float32 are flushed

    def refuse(self, why: str = "") -> Unsupported:
        operands = ", ".join(operand.text for operand in self.operands)
        return Unsupported(f"{self.what}: {operands}{f': {why}' if why else ''}")

    def expect(self, *numbers: int) -> None:
        """Refuse another number of operands."""
        if len(self.operands) not in numbers:
            raise self.refuse()

    def parts(self, operand: Operand, number: int) -> tuple[Operand, ...]:
        """The registers of an operand, one or a vector."""
        parts = operand.parts if operand.kind == "vector" else (operand,)
        if len(parts) != number:
            raise self.refuse()
        return parts

    def slots_of(self, parts: Iterable[Operand]) -> list[int]:
        return [self.slots[part.text] for part in parts if part.kind == "register"]

    def source(self, operand: Operand, kind: str) -> Source:
        """The bits of an operand, seen as the kind's numpy type."""
        dtype, bits = np.dtype(KINDS[kind].dtype), KINDS[kind].bits
        match operand.kind:
            case "register":
                return self._register(operand, dtype, bits)
            case "immediate":
                value = np.array(operand.value & ((1 << max(8, bits)) - 1), REGISTER[max(8, bits)])
                constant = value.view(dtype)[()] if kind != "pred" else np.bool_(operand.value != 0)
                return lambda g: constant
            case "shared":
                return lambda g: dtype.type(g.shared.base)
            case "param":  # its address: of a tensor map
                mask = (1 << bits) - 1
                return lambda g: dtype.type(g.params[operand.text] & mask)
            case "special":
                return lambda g: g.special(operand.text).astype(dtype)
        raise self.refuse()

    def _register(self, operand: Operand, dtype: Any, bits: int) -> Source:
        slot, width = self.slots[operand.text], self.kernel.registers[operand.text]
        if width < bits:
            raise self.refuse(f"{operand.text} is too narrow")
        if operand.negated:
            return lambda g: ~g.registers[slot]
        if width > bits:
            narrow = REGISTER[bits]
            return lambda g: g.registers[slot].astype(narrow).view(dtype)
        if dtype == REGISTER[width]:
            return lambda g: g.registers[slot]
        return lambda g: g.registers[slot].view(dtype)

    def number(self, operand: Operand, kind: str) -> Source:
        """The numbers that an operand's bits mean."""
        bits, decode = self.source(operand, kind), KINDS[kind].decode
        return bits if decode is None else lambda g: decode(bits(g))

    def target(self, operand: Operand) -> Write:
        """Writes bits; a wider register is filled with the sign of the bits' type."""
        if operand.kind == "sink":
            return lambda g, value, mask: None
        if operand.kind != "register":
            raise self.refuse()
        slot, dtype = self.slots[operand.text], np.dtype(REGISTER[self.kernel.registers[operand.text]])

        def write(g: Lanes, value: Any, mask: Mask) -> None:
            value = np.asarray(value)
            if value.dtype != dtype:
                if value.dtype.itemsize < dtype.itemsize and value.dtype.kind in "iu":
                    value = value.astype(f"{value.dtype.kind}{dtype.itemsize}")
                if value.dtype.itemsize != dtype.itemsize:
                    raise self.refuse(f"{value.dtype} does not fit {operand.text}")
                value = value.view(dtype)
            if value.shape != (g.n,):
                value = np.broadcast_to(value, g.n)
            g.registers[slot] = value if mask is None else np.where(mask, value, g.registers[slot])

        return write

    def result(self, operand: Operand, kind: str) -> Write:
        """Writes numbers as bits of a kind."""
        write, encode, dtype = self.target(operand), KINDS[kind].encode, KINDS[kind].dtype
        if encode is not None:
            return lambda g, value, mask: write(g, encode(value), mask)
        return lambda g, value, mask: write(g, np.asarray(value, dtype), mask)

    def address(self, operand: Operand) -> Callable[[Lanes], Array]:
        """Addresses, one per lane."""
        base, offset = operand.base, operand.value
        if base is None or base.kind not in ("register", "shared"):
            raise self.refuse()
        if base.kind == "shared":
            return lambda g: np.full(g.n, g.shared.base + offset, I64)
        value = self.source(base, f"u{self.kernel.registers[base.text]}")
        return lambda g: value(g).astype(I64) + offset

    def constant(self, operand: Operand) -> int:
        if operand.kind != "immediate":
            raise self.refuse()
        return operand.value


def full(g: Lanes, value: Any) -> Array:
    """Values of every lane."""
    return np.broadcast_to(value, g.n)


def chosen(g: Lanes, mask: Mask) -> Array:
    """The indices of the lanes that execute."""
    return g.every if mask is None else np.nonzero(mask)[0]
