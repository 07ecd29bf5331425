"""Moves, loads, stores, asynchronous copies and atomics."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fasttrain_kernels.testing.executed.ptx import Unsupported
from fasttrain_kernels.testing.executed.translate import Mask, Step, Translator, chosen, full, rule
from fasttrain_kernels.testing.executed.values import KINDS, REGISTER, U32

if TYPE_CHECKING:
    from fasttrain_kernels.testing.executed.lanes import Lanes

_TYPE = r"(b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64)"


@rule(r"mov\.(b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64|pred)")
def _mov(t: Translator, match: re.Match[str]) -> Step:
    t.expect(2)
    to, source = t.operands
    bits = KINDS[match[1]].bits
    if to.kind == "vector":
        part = bits // len(to.parts)
        whole, targets = t.source(source, f"b{bits}"), [t.target(part) for part in to.parts]

        def unpack(g: Lanes, m: Mask) -> None:
            narrow = np.ascontiguousarray(full(g, whole(g))).view(REGISTER[part]).reshape(g.n, -1)
            for i, write in enumerate(targets):
                write(g, np.ascontiguousarray(narrow[:, i]), m)

        return unpack
    if source.kind == "vector":
        part = bits // len(source.parts)
        sources, write = [t.source(p, f"b{part}") for p in source.parts], t.target(to)

        def pack(g: Lanes, m: Mask) -> None:
            values = np.empty((g.n, len(sources)), REGISTER[part])
            for i, read in enumerate(sources):
                values[:, i] = read(g)
            write(g, values.view(REGISTER[bits])[:, 0], m)

        return pack
    value, write = t.source(source, match[1]), t.target(to)
    return lambda g, m: write(g, value(g), m)


@rule(r"ld\.param\.(b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64)")
def _ld_param(t: Translator, match: re.Match[str]) -> Step:
    base, bits = t.operands[1].base, KINDS[match[1]].bits
    if base is None or t.operands[1].value or t.operands[0].kind != "register":
        raise t.refuse()
    write, dtype = t.target(t.operands[0]), KINDS[match[1]].dtype

    def load(g: Lanes, m: Mask) -> None:
        write(g, np.array(g.params[base.text] & ((1 << bits) - 1), REGISTER[bits]).view(dtype), m)

    return load


# Evict and cache hints (.L1::evict_last, .ca, ...) and memory order do not change what one launch computes here.
_ACCESS = (
    r"{}(?:\.(?:volatile|relaxed|acquire|release|weak))?(?:\.(?:gpu|sys|cta))?\.(global|shared|shared::cta)"
    r"(?:\.(?:ca|cg|cs|cv|wb|wt|nc|lu))?(?:\.L[12]::[\w:]+)*(?:\.(v2|v4|v8))?\." + _TYPE
)


@rule(_ACCESS.format("ld"))
def _load(t: Translator, match: re.Match[str]) -> Step:
    count, part = int((match[2] or "v1")[1:]), KINDS[match[3]].bits // 8
    parts = t.parts(t.operands[0], count)
    targets, slots = [t.target(register) for register in parts], t.slots_of(parts)
    address, width, what, dtype = t.address(t.operands[1]), part * count, t.what, KINDS[match[3]].dtype
    in_global = match[1] == "global"

    def load(g: Lanes, m: Mask) -> None:
        lanes = chosen(g, m)
        if not lanes.size:
            return
        at = address(g)[lanes]
        if in_global:
            values = g.memory.load(at, width, part, g.who[lanes], what)
            g.launch.bytes_read += at.size * width
        else:
            values, undefined = g.shared.load(at, width, part, g.block[lanes], g.who[lanes], what)
            g.note_banks(at, lanes, width)
            if undefined is not None:
                g.set_undefined(slots, g.spread(undefined, lanes))
        for i, write in enumerate(targets):
            column = np.ascontiguousarray(values[:, i]).view(dtype)
            write(g, column if m is None else g.spread(column, lanes), m)

    return load


@rule(_ACCESS.format("st"))
def _store(t: Translator, match: re.Match[str]) -> Step:
    count, part = int((match[2] or "v1")[1:]), KINDS[match[3]].bits // 8
    parts = t.parts(t.operands[1], count)
    sources, slots = [t.source(register, match[3]) for register in parts], t.slots_of(parts)
    address, width, what = t.address(t.operands[0]), part * count, t.what
    in_global = match[1] == "global"

    def store(g: Lanes, m: Mask) -> None:
        lanes = chosen(g, m)
        if not lanes.size:
            return
        at, values = address(g)[lanes], np.empty((lanes.size, count), f"u{part}")
        for i, read in enumerate(sources):
            values[:, i] = np.ascontiguousarray(full(g, read(g))[lanes]).view(f"u{part}")
        if in_global:
            g.memory.store(at, values, part, g.who[lanes], what)
            g.launch.bytes_written += at.size * width
        else:
            undefined = g.undefined_in(slots) if g.undefined else None
            some = None if undefined is None else undefined[lanes]
            g.shared.store(at, values, part, g.block[lanes], g.who[lanes], what, some)
            g.note_banks(at, lanes, width)

    return store


# Asynchronous copies. A group is complete when it is waited for, and not earlier.


@rule(r"cp\.async\.(cg|ca)\.shared\.global(?:\.L[12]::[\w:]+)*")
def _cp_async(t: Translator, match: re.Match[str]) -> Step:
    t.expect(3, 4)
    to, source, width, what = t.address(t.operands[0]), t.address(t.operands[1]), t.constant(t.operands[2]), t.what
    if width not in ((16,) if match[1] == "cg" else (4, 8, 16)):
        raise t.refuse()
    size = t.source(t.operands[3], "u32") if len(t.operands) == 4 else None

    def copy(g: Lanes, m: Mask) -> None:
        lanes = chosen(g, m)
        if not lanes.size:
            return
        wanted = full(g, width if size is None else size(g))[lanes]
        if not np.isin(wanted, (0, width)).all():
            raise Unsupported(f"{what}: copies some of its bytes")
        values, real = np.zeros((lanes.size, width // 4), U32), wanted > 0  # the rest is filled with zeros
        if real.any():
            values[real] = g.memory.load(source(g)[lanes][real], width, 4, g.who[lanes][real], what)
            g.launch.bytes_read += int(real.sum()) * width
        at = to(g)[lanes]
        offset = g.shared.offset(at, width, g.block[lanes], what)
        g.shared.begin_copy(offset, width, g.who[lanes], what)
        g.note_banks(at, lanes, width)
        g.copies.append((lanes, offset, values, g.copy_group[lanes], what))

    return copy


@rule(r"cp\.async\.commit_group")
def _commit(t: Translator, match: re.Match[str]) -> Step:
    def commit(g: Lanes, m: Mask) -> None:
        g.copy_group = g.copy_group + (1 if m is None else m)

    return commit


@rule(r"cp\.async\.wait_group", r"cp\.async\.wait_all")
def _wait(t: Translator, match: re.Match[str]) -> Step:
    allowed = t.constant(t.operands[0]) if t.operands else -1

    def wait(g: Lanes, m: Mask) -> None:
        active = np.ones(g.n, np.bool_) if m is None else m
        remaining = []
        for lanes, offset, values, group, what in g.copies:
            done = active[lanes] & (group < g.copy_group[lanes] - allowed)
            if done.any():
                g.shared.end_copy(offset[done], values[done], g.who[lanes[done]], what)
            if not done.all():
                left = ~done
                remaining.append((lanes[left], offset[left], values[left], group[left], what))
        g.copies = remaining

    return wait


@rule(r"fence\.proxy\.async(?:\.shared::cta|\.global)?")
def _proxy_fence(t: Translator, match: re.Match[str]) -> Step:
    def fence(g: Lanes, m: Mask) -> None:
        lanes = chosen(g, m)
        g.shared.fence(g.block[lanes], g.warp[lanes])

    return fence


@rule(
    r"fence(?:\.\w+)?\.(?:gpu|cta|sys)",
    r"membar\.\w+",
    r"griddepcontrol\.\w+",
    r"createpolicy\..*",
    r"prefetch\..*",
    r"setmaxnreg\..*",
)
def _order(t: Translator, match: re.Match[str]) -> Step:
    """Memory order, prefetching, shares of registers: accesses happen in the order of execution here."""
    if match[0].startswith("createpolicy"):
        write = t.target(t.operands[0])
        return lambda g, m: write(g, np.uint64(0), m)
    return lambda g, m: None


# Atomics: one lane after the other, in the order of lanes. They are no race, and order nothing.

_ATOMIC = (
    r"(?=.*\.(global|shared))(?:\.(?:relaxed|acquire|release|acq_rel|gpu|sys|cta|global|shared|shared::cta))+"
    r"\.(add|min|max|and|or|xor|exch|cas|inc)(?:\.noftz)?(?:\.(v2|v4|v8))?\.(b32|b64|u32|u64|s32|s64|f32|f64|f16x2|"
    r"bf16x2|f16|bf16)"
)
_UPDATES: dict[str, Callable[..., Any]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, new: new,
}  # fmt: skip


@rule(rf"atom{_ATOMIC}", rf"red{_ATOMIC}")
def _atomic(t: Translator, match: re.Match[str]) -> Step:
    in_global, operation, what = match[1] == "global", match[2], t.what
    count, kind = int((match[3] or "v1")[1:]), KINDS[match[4]]
    operands = list(t.operands)
    targets = [t.target(p) for p in t.parts(operands.pop(0), count)] if match[0].startswith("atom") else []
    address, width = t.address(operands.pop(0)), kind.bits // 8
    if operation not in (*_UPDATES, "cas") or (operation == "cas") != (len(operands) == 2):
        raise t.refuse()
    sources = [[t.source(p, match[4]) for p in t.parts(operand, count)] for operand in operands]
    encode, decode = kind.encode or (lambda x: x), kind.decode or (lambda x: x)

    def update(g: Lanes, m: Mask) -> None:
        lanes = chosen(g, m)
        if not lanes.size:
            return
        at = address(g)[lanes]
        if in_global:
            offset, view = g.memory.offset(at, width * count, what), g.memory.views[width]
            g.launch.bytes_atomic += lanes.size * width * count
        else:
            offset, view = g.shared.offset(at, width * count, g.block[lanes], what), g.shared.views[width]
            g.shared.check_operand(g.shared.granules(offset, width * count), what)
        for i in range(count):
            given = [np.ascontiguousarray(full(g, s[i](g))[lanes]) for s in sources]
            old = np.empty(lanes.size, kind.dtype)
            for n, one in enumerate(offset // width + i):
                before = view[one : one + 1].view(kind.dtype)
                old[n] = before[0]
                if operation == "cas":
                    new = given[1][n : n + 1] if old[n] == given[0][n] else before
                else:
                    new = np.asarray(encode(_UPDATES[operation](decode(before), decode(given[0][n : n + 1]))))
                view[one : one + 1] = new.astype(kind.dtype).view(view.dtype)
            if targets:
                targets[i](g, g.spread(old, lanes), m)

    return update
