"""wgmma: matmuls of four warps, with operands that descriptors find in shared memory.

Every warp computes its own 16 of the 64 rows, so that warps may be scheduled one by one. A result is formed at once,
but its registers hold poison until it is waited for, and then the operands in shared memory must be what they were.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from fasttrain_kernels.testing.executed.descriptors import chunk_addresses, flat, matrix
from fasttrain_kernels.testing.executed.memory import Fault
from fasttrain_kernels.testing.executed.ptx import Unsupported
from fasttrain_kernels.testing.executed.translate import Mask, Source, Step, Translator, full, rule
from fasttrain_kernels.testing.executed.values import ELEMENT_BITS, F32, U32, U64, Array
from fasttrain_kernels.testing.executed.warps import check_whole_warps, operand_a

if TYPE_CHECKING:
    from fasttrain_kernels.testing.executed.lanes import Lanes

_SPANS = {1: 128, 2: 64, 3: 32}  # bytes of a swizzle's rows, by its code
_NOT_READY = 0x7FC0DEAD  # NaN


@rule(r"wgmma\.fence\.sync\.aligned")
def _fence(t: Translator, match: re.Match[str]) -> Step:
    return lambda g, m: check_whole_warps(g, m, t.what)


@rule(r"wgmma\.commit_group\.sync\.aligned")
def _commit(t: Translator, match: re.Match[str]) -> Step:
    def commit(g: Lanes, m: Mask) -> None:
        _check_all(m, t.what)
        g.wgmma.reads.append([])

    return commit


@rule(r"wgmma\.wait_group\.sync\.aligned")
def _wait(t: Translator, match: re.Match[str]) -> Step:
    allowed = t.constant(t.operands[0])

    def wait(g: Lanes, m: Mask) -> None:
        _check_all(m, t.what)
        pending = g.wgmma
        while len(pending.reads) - 1 > allowed:
            for read in pending.reads.pop(0):
                read.check_unchanged(g)
        if allowed == 0 or not any(pending.reads[:-1]):
            for slot, value in pending.results.items():
                g.registers[slot] = value
            pending.results.clear()
            pending.operands.clear()

    return wait


def _check_all(m: Mask, what: str) -> None:
    if m is not None:
        raise Unsupported(f"{what}: executed by some warps only")


class WgmmaState:
    """What the instructions of a group of lanes have issued, and nobody has waited for."""

    def __init__(self) -> None:
        self.results: dict[int, Array] = {}  # by register
        self.operands: set[int] = set()  # registers that are being read
        self.reads: list[list[OperandRead]] = [[]]  # of shared memory, by group; the last is open


class OperandRead:
    """An operand in shared memory, read for the warps of a group: (warps, chunks)."""

    def __init__(self, g: Lanes, address: Array, what: str) -> None:
        warps, chunks = address.shape
        self.what, self.lanes = what, np.repeat(np.arange(warps) * 32, chunks)  # a warp's first lane stands for it
        self.offset = g.shared.offset(flat(address), 16, g.block[self.lanes], what)
        self.at = g.shared.granules(self.offset, 16)
        g.shared.check_operand(self.at, what)
        g.shared.check_read(self.at, g.who[self.lanes], what)
        g.shared.check_proxy(self.at, g.block[self.lanes], g.warp[self.lanes], what)
        self.values = g.shared.gather(self.offset, 16, 4)

    def check_unchanged(self, g: Lanes) -> None:
        if (g.shared.gather(self.offset, 16, 4) != self.values).any():
            raise Fault(f"{self.what}: an operand in shared memory changed before the matmul was waited for")
        g.shared.check_read(self.at, g.who[self.lanes], self.what)


@rule(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(bf16|f16|tf32|e4m3|e5m2)\.(bf16|f16|tf32|e4m3|e5m2)")
def _wgmma(t: Translator, match: re.Match[str]) -> Step:
    columns, k, kinds, what = int(match[1]), int(match[2]), (match[3], match[4]), t.what
    d, a, b, scale_d, *rest = t.operands
    in_registers, transposable = a.kind == "vector", ELEMENT_BITS[kinds[0]] == 16
    negations, transpositions = [t.constant(o) for o in rest[:2]], [bool(t.constant(o)) for o in rest[2:]]
    expected = (1 if in_registers else 2) if transposable else 0
    wrong_width = any(k * ELEMENT_BITS[kind] != 256 for kind in kinds)
    if len(transpositions) != expected or negations != [1, 1] or len(d.parts) != columns // 2 or wrong_width:
        raise t.refuse()
    transpose_a, transpose_b = [False, False, *transpositions][-2:]
    slots = [t.slots[part.text] for part in d.parts]
    held = {t.slots[part.text] for part in a.parts}
    registers = [t.source(part, "b32") for part in a.parts]
    left = None if in_registers else t.source(a, "b64")
    right, accumulate = t.source(b, "b64"), t.source(scale_d, "pred")

    def multiply(g: Lanes, m: Mask) -> None:
        _check_all(m, what)
        warps = g.n // 32
        g.launch.mma_flops += 2 * 16 * columns * k * warps
        if left is None:
            matrix_a = operand_a([full(g, read(g)) for read in registers], kinds[0])
        else:
            rows = [16 * (g.warp[32 * warp] % 4) + np.arange(16) for warp in range(warps)]
            matrix_a = _operand(g, left, rows, transpose_a, kinds[0], what)
        matrix_b = _operand(g, right, [np.arange(columns)] * warps, transpose_b, kinds[1], what)
        out = np.matmul(matrix_a, matrix_b.transpose(0, 2, 1))  # (warps, 16, columns)
        out = out.reshape(warps, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(columns // 2, g.n)
        kept, poison = full(g, accumulate(g)), np.full(g.n, _NOT_READY, U32)
        for i, slot in enumerate(slots):
            before = g.wgmma.results.get(slot, g.registers[slot]).view(F32)
            g.wgmma.results[slot] = (np.where(kept, before, F32(0)) + out[i]).view(U32)
            g.registers[slot] = poison
        g.wgmma.operands |= held

    return multiply


def _operand(g: Lanes, source: Source, rows: list[Array], transposed: bool, kind: str, what: str) -> Any:
    """An operand of every warp: (warps, rows, k)."""
    given = full(g, source(g)).astype(U64).reshape(-1, 32)
    if (given != given[:, :1]).any():
        raise Fault(f"{what}: the lanes of a warp give different descriptors")
    addresses = []
    for descriptor, of in zip(given[:, 0].tolist(), rows, strict=True):
        if descriptor >> 62 not in _SPANS or descriptor >> 49 & 7:
            raise Unsupported(f"{what}: descriptor {descriptor:#x}")
        addresses.append(chunk_addresses(descriptor, _SPANS[descriptor >> 62], of, kind, transposed))
    read = OperandRead(g, np.stack([flat(address) for address in addresses]), what)
    g.wgmma.reads[-1].append(read)
    chunks = read.values.reshape(len(rows), *addresses[0].shape, 4)
    return np.stack([matrix(of_warp, kind, transposed) for of_warp in chunks])
