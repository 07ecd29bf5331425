"""What the lanes of a warp do together: shuffles, reductions, matrices in shared memory, matmuls in registers.

The fragments of mma, by the PTX manual: lane = 4 * group + pair; a register holds 32 bits of consecutive columns.

    A, rows x k   register [column half][row half]: row = 8 * row half + group, columns from (4 * half + pair) * per
    B, k x 8      register [half]: column = group, rows from (4 * half + pair) * per        (per: elements in 32 bits)
    C, 16 x 8     register [row half][column]: row = 8 * row half + group, column = 2 * pair + column
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fasttrain_kernels.testing.executed.memory import Fault
from fasttrain_kernels.testing.executed.ptx import Operand, Unsupported
from fasttrain_kernels.testing.executed.translate import Mask, Step, Translator, full, rule
from fasttrain_kernels.testing.executed.values import ELEMENT_BITS, F32, I32, I64, U16, U32, U64, Array, elements

if TYPE_CHECKING:
    from fasttrain_kernels.testing.executed.lanes import Lanes


def check_whole_warps(g: Lanes, m: Mask, what: str) -> None:
    if m is not None:
        some = m.reshape(-1, 32)
        if (some.any(1) != some.all(1)).any():
            raise Fault(f"{what}: not all lanes of a warp execute it")


def _check_members(t: Translator, operand: Operand) -> Callable[[Lanes, Mask], None]:
    """The member mask names all lanes: Triton emits nothing else."""
    members, what = t.source(operand, "u32"), t.what

    def check(g: Lanes, m: Mask) -> None:
        mask = full(g, members(g))
        if (mask != 0xFFFFFFFF).any() if m is None else (mask[m] != 0xFFFFFFFF).any():
            raise Unsupported(f"{what}: some lanes only")
        check_whole_warps(g, m, what)

    return check


@rule(r"shfl\.sync\.(bfly|idx|up|down)\.b32")
def _shuffle(t: Translator, match: re.Match[str]) -> Step:
    t.expect(5)
    mode, check = match[1], _check_members(t, t.operands[4])
    to, predicate = t.operands[0].parts if t.operands[0].kind == "vector" else (t.operands[0], None)
    value, by, clamp = (t.source(operand, "u32") for operand in t.operands[1:4])
    write, write_predicate = t.target(to), t.target(predicate) if predicate else None

    def shuffle(g: Lanes, m: Mask) -> None:
        check(g, m)
        distance, packed = full(g, by(g)).astype(I64) & 31, full(g, clamp(g)).astype(I64)
        segment, bound = packed >> 8 & 31, packed & 31
        lowest, highest = g.lane & segment, (g.lane & segment) | (bound & ~segment)
        match mode:
            case "bfly":
                lane = g.lane ^ distance
            case "idx":
                lane = lowest | (distance & ~segment)
            case "up":
                lane = g.lane - distance
            case _:
                lane = g.lane + distance
        inside = lane >= highest if mode == "up" else lane <= highest
        lane = np.where(inside, lane, g.lane)
        write(g, full(g, value(g))[g.every - g.lane + lane], m)
        if write_predicate:
            write_predicate(g, inside, m)

    return shuffle


_REDUCTIONS: dict[str, Any] = {
    "min": np.minimum, "max": np.maximum, "add": np.add, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


@rule(
    r"redux\.sync\.(add|min|max)()\.([us]32)", r"redux\.sync\.(and|or|xor)()\.(b32)",
    r"redux\.sync\.(min|max)(\.NaN)?\.(f32)",
)  # fmt: skip
def _reduce(t: Translator, match: re.Match[str]) -> Step:
    t.expect(3)
    check, function = _check_members(t, t.operands[2]), _REDUCTIONS[match[1]]
    if match[3] == "f32" and not match[2]:
        function = {"min": np.fmin, "max": np.fmax}[match[1]]
    value, write = t.source(t.operands[1], match[3]), t.target(t.operands[0])

    def reduce(g: Lanes, m: Mask) -> None:
        check(g, m)
        by_warp = full(g, value(g)).reshape(-1, 32)
        write(g, np.repeat(function.reduce(by_warp, axis=1, dtype=by_warp.dtype), 32), m)

    return reduce


@rule(r"vote\.sync\.(ballot)\.b32", r"vote\.sync\.(any|all|uni)\.pred")
def _vote(t: Translator, match: re.Match[str]) -> Step:
    t.expect(3)
    check, value, write = _check_members(t, t.operands[2]), t.source(t.operands[1], "pred"), t.target(t.operands[0])
    function: Callable[[Array], Array] = {
        "ballot": lambda votes: (votes.astype(U64) << np.arange(32, dtype=U64)).sum(1).astype(U32),
        "any": lambda votes: votes.any(1),
        "all": lambda votes: votes.all(1),
        "uni": lambda votes: votes.all(1) | ~votes.any(1),
    }[match[1]]

    def vote(g: Lanes, m: Mask) -> None:
        check(g, m)
        write(g, np.repeat(function(full(g, value(g)).reshape(-1, 32)), 32), m)

    return vote


@rule(r"elect\.sync")
def _elect(t: Translator, match: re.Match[str]) -> Step:
    to, predicate = t.operands[0].parts
    write, write_predicate, what = t.target(to), t.target(predicate), t.what

    def elect(g: Lanes, m: Mask) -> None:
        check_whole_warps(g, m, what)
        write(g, U32(0), m)
        write_predicate(g, g.lane == 0, m)

    return elect


@rule(r"bar\.warp\.sync")
def _warp_barrier(t: Translator, match: re.Match[str]) -> Step:
    return lambda g, m: check_whole_warps(g, m, t.what)


# 8x8 matrices of 16-bit elements: lane i of each eight gives the address of row i


@rule(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _ldmatrix(t: Translator, match: re.Match[str]) -> Step:
    number, transposed, what = int(match[1]), bool(match[2]), t.what
    parts = t.parts(t.operands[0], number)
    targets, slots, address = [t.target(register) for register in parts], t.slots_of(parts), t.address(t.operands[1])

    def load(g: Lanes, m: Mask) -> None:
        check_whole_warps(g, m, what)
        lanes = _row_lanes(g, m, number)
        at = address(g)[lanes]
        rows = np.zeros((g.n, 4), U32)
        rows[lanes], undefined = g.shared.load(at, 16, 4, g.block[lanes], g.who[lanes], what)
        g.note_banks(at, lanes, 16)
        if undefined is not None:  # by warps: which lane gets which element would be as long as the load itself
            g.set_undefined(slots, np.repeat(g.spread(undefined, lanes).reshape(-1, 32).any(1), 32))
        matrices = rows.view(U16).reshape(-1, 4, 8, 8)[:, :number]  # warp, matrix, row, column
        if transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        pairs = np.ascontiguousarray(matrices).reshape(-1, number, 32, 2).view(U32)[..., 0]
        for i, write in enumerate(targets):
            write(g, np.ascontiguousarray(pairs[:, i]).reshape(g.n), m)

    return load


@rule(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _stmatrix(t: Translator, match: re.Match[str]) -> Step:
    number, transposed, what = int(match[1]), bool(match[2]), t.what
    parts = t.parts(t.operands[1], number)
    sources, slots, address = [t.source(p, "b32") for p in parts], t.slots_of(parts), t.address(t.operands[0])

    def store(g: Lanes, m: Mask) -> None:
        check_whole_warps(g, m, what)
        rows = np.zeros((g.n // 32, 4, 8, 8), U16)
        for i, read in enumerate(sources):
            matrix = np.ascontiguousarray(full(g, read(g))).view(U16).reshape(-1, 8, 8)
            rows[:, i] = matrix.transpose(0, 2, 1) if transposed else matrix
        lanes = _row_lanes(g, m, number)
        at = address(g)[lanes]
        values = rows.reshape(g.n, 8).view(U32)[lanes]
        undefined = g.undefined_in(slots) if g.undefined else None
        some = None if undefined is None else np.repeat(undefined.reshape(-1, 32).any(1), 32)[lanes]
        g.shared.store(at, values, 4, g.block[lanes], g.who[lanes], what, some)
        g.note_banks(at, lanes, 16)

    return store


def _row_lanes(g: Lanes, m: Mask, number: int) -> Array:
    used = g.lane < 8 * number
    return np.nonzero(used if m is None else used & m)[0]


# Matmuls


INT32 = -(2**31), 2**31 - 1


def operand_a(registers: list[Any], kind: str) -> Any:  # -> (warps, 16, k)
    per, halves = 32 // ELEMENT_BITS[kind], len(registers) // 2
    packed = elements(np.stack(registers), kind).reshape(halves, 2, -1, 8, 4, per)
    return packed.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, halves * 4 * per)


def _operand_b(registers: list[Any], kind: str) -> Any:  # -> (warps, k, 8)
    per, halves = 32 // ELEMENT_BITS[kind], len(registers)
    packed = elements(np.stack(registers), kind).reshape(halves, -1, 8, 4, per)
    return packed.transpose(1, 0, 3, 4, 2).reshape(-1, halves * 4 * per, 8)


@rule(
    r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.satfinite)?\.(f32|s32)\.(bf16|f16|tf32|e4m3|e5m2|s8|u8)\.(\w+)\.(f32|s32)"
)
def _mma(t: Translator, match: re.Match[str]) -> Step:
    t.expect(4)
    k, kinds, integers = int(match[1]), (match[3], match[4]), match[2] == "s32"
    registers = k * ELEMENT_BITS[kinds[0]] // 128  # of A for each half of its rows, and of B
    mixed = kinds[0] != kinds[1] and not any(set(kinds) == pair for pair in ({"e4m3", "e5m2"}, {"s8", "u8"}))
    if registers not in (1, 2) or mixed or match[2] != match[5] or integers != (kinds[0] in ("s8", "u8")):
        raise t.refuse()
    d, a, b, c = t.operands
    saturates = "satfinite" in match[0]
    accumulator, what, flops = match[2], t.what, 2 * 16 * 8 * k
    targets = [t.target(part) for part in t.parts(d, 4)]
    left = [t.source(part, "b32") for part in t.parts(a, 2 * registers)]
    right = [t.source(part, "b32") for part in t.parts(b, registers)]
    added = [t.source(part, accumulator) for part in t.parts(c, 4)]

    def multiply(g: Lanes, m: Mask) -> None:
        check_whole_warps(g, m, what)
        g.launch.mma_flops += flops * (g.n // 32 if m is None else int(m.sum()) // 32)
        matrix_a = operand_a([full(g, read(g)) for read in left], kinds[0])
        matrix_b = _operand_b([full(g, read(g)) for read in right], kinds[1])
        acc = np.stack([full(g, read(g)) for read in added]).reshape(2, 2, -1, 8, 4)
        product = np.matmul(matrix_a, matrix_b)
        acc = acc.transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
        out = np.clip(acc.astype(I64) + product, *INT32) if saturates else acc + product
        out = out.astype(I32 if integers else F32, copy=False)
        out = out.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for i, write in enumerate(targets):
            write(g, out[i], m)

    return multiply
