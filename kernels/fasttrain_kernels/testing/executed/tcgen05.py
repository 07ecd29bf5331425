"""tcgen05: matmuls between shared and tensor memory that one lane issues.

Issued matmuls wait in a queue. They are formed as late as possible, when somebody waits for the mbarrier that their
commit names: operands that are overwritten too early, or results that are read too early, then give wrong numbers.
With `execute(asynchronous="early")` they are formed as early as possible. Both must give the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fasttrain_kernels.testing.executed.descriptors import chunk_addresses, flat, matrix
from fasttrain_kernels.testing.executed.mbarriers import Mbarriers
from fasttrain_kernels.testing.executed.memory import Fault
from fasttrain_kernels.testing.executed.ptx import Operand, Unsupported
from fasttrain_kernels.testing.executed.translate import Mask, Source, Step, Translator, chosen, full, rule
from fasttrain_kernels.testing.executed.values import ELEMENT_BITS, F32, I64, U32, Array, elements
from fasttrain_kernels.testing.executed.warps import check_whole_warps

if TYPE_CHECKING:
    from fasttrain_kernels.testing.executed.lanes import Lanes

_SPANS = {2: 128, 4: 64, 6: 32}  # bytes of a swizzle's rows, by its code
_TYPES = {  # of operands, by the codes of instruction descriptors
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
}
_COLUMNS = 512
_UNINITIALISED = 0x7FC0DEAD  # NaN


class TensorMemory:
    """128 lanes x 512 columns of 32 bits for each block, the queues of matmuls, and the mbarriers."""

    def __init__(self, blocks: int, barriers: Mbarriers, *, early: bool) -> None:
        self.cells = np.full((blocks, 128, _COLUMNS), _UNINITIALISED, U32)
        self.known = np.zeros((blocks, 128, _COLUMNS), np.bool_)
        self.storing = np.zeros((blocks, 128, _COLUMNS), np.bool_)  # by tcgen05.st, before its wait
        self.allocated = np.zeros(blocks, I64)  # columns
        self.queues: list[list[Callable[[], None] | int]] = [[] for _ in range(blocks)]  # matmuls; arrivals
        self.barriers = barriers
        self.uninitialised: Counter[str] = Counter()
        self.early = early

    def at(self, address: Array, columns: int, block: Any, what: str) -> tuple[Array, Array]:
        """Rows and columns of addresses."""
        row, column = address >> 16, address & 0xFFFF
        if (column + columns > self.allocated[block]).any() or (row >= 128).any():
            allocated = ", ".join(map(str, np.unique(self.allocated[block])))
            raise Fault(
                f"{what}: tensor memory {int(np.ravel(address)[0]):#x} (+{columns} columns) outside of the "
                f"{allocated} allocated columns"
            )
        return row, column

    def check_operand(self, known: Array, what: str) -> None:
        if not known.all():
            self.uninitialised[f"{what} reads an operand that nobody wrote"] += int((~known).sum())

    def enqueue(self, block: int, item: Callable[[], None] | int) -> None:
        self.queues[block].append(item)
        if self.early:
            self.drain(block)

    def drain(self, block: int, until: int | None = None) -> bool:
        """Form matmuls in order, up to the commit that arrives at the mbarrier `until`."""
        queue = self.queues[block]
        while queue:
            item = queue.pop(0)
            if callable(item):
                item()
                continue
            if barrier := self.barriers.known.get((block, item)):  # or it is gone, which has been reported
                barrier.arrive()
            if item == until:
                return True
        return False

    def unfinished(self) -> list[str]:
        found = ["ends with matmuls that nobody waited for"] if any(self.queues) else []
        return [*found, "ends with allocated tensor memory"] if self.allocated.any() else found


@rule(r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32")
def _alloc(t: Translator, match: re.Match[str]) -> Step:
    address, columns, what = t.address(t.operands[0]), t.constant(t.operands[1]), t.what

    def allocate(g: Lanes, m: Mask) -> None:
        check_whole_warps(g, m, what)
        lanes = chosen(g, m)
        lanes = lanes[g.lane[lanes] == 0]
        if lanes.size:
            if g.tensor.allocated[g.block[lanes]].any():
                raise Unsupported(f"{what}: a second allocation")
            g.tensor.allocated[g.block[lanes]] = columns
            at, first = address(g)[lanes], np.zeros((lanes.size, 1), U32)
            g.shared.store(at, first, 4, g.block[lanes], g.who[lanes], what)

    return allocate


@rule(r"tcgen05\.wait::st\.sync\.aligned")
def _wait_store(t: Translator, match: re.Match[str]) -> Step:
    def wait(g: Lanes, m: Mask) -> None:
        check_whole_warps(g, m, t.what)
        lanes = chosen(g, m)
        lanes = lanes[g.lane[lanes] == 0]
        rows = g.warp[lanes][:, None] % 4 * 32 + np.arange(32)
        g.tensor.storing[g.block[lanes][:, None], rows] = False

    return wait


@rule(r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned")
def _together(t: Translator, match: re.Match[str]) -> Step:
    return lambda g, m: check_whole_warps(g, m, t.what)


@rule(r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32")
def _dealloc(t: Translator, match: re.Match[str]) -> Step:
    columns, what = t.constant(t.operands[1]), t.what

    def deallocate(g: Lanes, m: Mask) -> None:
        lanes = chosen(g, m)
        for block in g.block[lanes[g.lane[lanes] == 0]]:
            if g.tensor.allocated[block] != columns:
                raise Fault(f"{what}: {columns} columns of {g.tensor.allocated[block]}")
            if g.tensor.queues[block]:
                raise Fault(f"{what}: matmuls are under way")
            g.tensor.allocated[block] = 0

    return deallocate


@rule(r"tcgen05\.wait::ld\.sync\.aligned")
def _wait_load(t: Translator, match: re.Match[str]) -> Step:
    return lambda g, m: g.unready.clear()


@rule(r"tcgen05\.(ld|st)\.sync\.aligned\.(32x32b|16x32bx2)\.x(\d+)(?:\.unpack::16b|\.pack::16b)?\.b32")
def _load_store(t: Translator, match: re.Match[str]) -> Step:
    load, shape, number, what = match[1] == "ld", match[2], int(match[3]), t.what
    operands = list(t.operands)
    parts = t.parts(operands.pop(0) if load else operands.pop(), number)
    address = _tensor_address(t, operands.pop(0))
    split = t.constant(operands.pop(0)) if shape == "16x32bx2" else 0
    if operands or "pack" in match[0]:
        raise t.refuse()

    def cells(g: Lanes, active: Array) -> tuple[Array, Array, Array]:
        """Block, row and column of each register: (lanes, registers). Warp w reaches rows 32 * (w % 4) on."""
        lanes = np.nonzero(active)[0]
        given = address(g)[lanes]
        if (given.reshape(-1, 32) != given.reshape(-1, 32)[:, :1]).any():
            raise Fault(f"{what}: the lanes of a warp give different addresses")
        row, column = g.tensor.at(given, number + split, g.block[lanes], what)
        lane = g.lane[lanes]
        if (row // 32 != g.warp[lanes] % 4).any() or (row % 32 + (32 if not split else 16) > 32).any():
            raise Fault(f"{what}: a warp reaches rows of tensor memory that belong to another")
        if split:  # the upper 16 lanes hold the columns behind the split
            row, column = row + lane % 16, column + lane // 16 * split
        else:
            row = row + lane
        return g.block[lanes][:, None], row[:, None], column[:, None] + np.arange(number)

    if load:
        targets, slots = [t.target(part) for part in parts], t.slots_of(parts)

        def read(g: Lanes, m: Mask) -> None:
            check_whole_warps(g, m, what)
            active = np.ones(g.n, np.bool_) if m is None else m
            if active.any():
                at = cells(g, active)
                _note_storing(g, at, what)
                known = g.tensor.known[at].all(1)
                if not known.all():
                    g.set_undefined(slots, g.spread(np.logical_not(known), np.nonzero(active)[0]))
                values = np.zeros((g.n, number), U32)
                values[active] = g.tensor.cells[at]
                for i, write in enumerate(targets):
                    write(g, np.ascontiguousarray(values[:, i]), m)
                g.unready.update(slots)

        return read
    sources, stored = [t.source(part, "b32") for part in parts], t.slots_of(parts)

    def store(g: Lanes, m: Mask) -> None:
        check_whole_warps(g, m, what)
        active = np.ones(g.n, np.bool_) if m is None else m
        if active.any():
            at = cells(g, active)
            g.tensor.cells[at] = np.stack([full(g, source(g)) for source in sources], 1)[active]
            undefined = g.undefined_in(stored)
            g.tensor.storing[at] = True
            g.tensor.known[at] = True if undefined is None else ~undefined[active][:, None]

    return store


def _note_storing(g: Lanes, at: Any, what: str) -> None:
    if storing := int(g.tensor.storing[at].sum()):
        g.launch.early[f"reads what tcgen05.st stores: {what}"] += storing


def _tensor_address(t: Translator, operand: Operand) -> Callable[[Lanes], Array]:
    if operand.base is None:
        raise t.refuse()
    value, offset = t.source(operand.base, "u32"), operand.value
    return lambda g: full(g, value(g)).astype(I64) + offset


@rule(r"tcgen05\.mma\.cta_group::1\.kind::(f16|tf32|f8f6f4)")
def _mma(t: Translator, match: re.Match[str]) -> Step:
    t.expect(5)
    d, a, b, instruction, keep = t.operands
    to = _tensor_address(t, d)
    left: Source = _tensor_address(t, a) if a.kind == "address" else t.source(a, "b64")
    right, describe, accumulate = t.source(b, "b64"), t.source(instruction, "u32"), t.source(keep, "pred")

    def issue(g: Lanes, m: Mask) -> None:
        if m is None:
            raise Fault(f"{t.what}: issued by all lanes")
        for lane in np.nonzero(m)[0]:
            values = [int(full(g, source(g))[lane]) for source in (to, left, right, describe, accumulate)]
            _issue(g, int(lane), *values, types=_TYPES[match[1]], in_tensor_memory=a.kind == "address", what=t.what)

    return issue


def _issue(
    g: Lanes, lane: int, to: int, left: int, right: int, code: int, accumulate: int, *,
    types: dict[int, str], in_tensor_memory: bool, what: str,
) -> None:  # fmt: skip
    """Queue the matmul that an instruction descriptor describes."""
    tensor, block = g.tensor, int(g.block[lane])
    rows, columns = (code >> 24 & 31) << 4, (code >> 17 & 63) << 3
    transpose_a, transpose_b = bool(code >> 15 & 1), bool(code >> 16 & 1)
    kinds = types.get(code >> 7 & 7, ""), types.get(code >> 10 & 7, "")
    float32 = (code >> 4 & 3) == 1
    if not float32 or not all(kinds) or code & 0x600F or rows not in (64, 128):
        raise Unsupported(f"{what}: instruction descriptor {code:#x}")
    if (transpose_a or transpose_b) and ELEMENT_BITS[kinds[0]] == 32:
        raise Unsupported(f"{what}: a transposed operand of {kinds[0]}")
    g.launch.mma_flops += 2 * rows * columns * 256 // ELEMENT_BITS[kinds[0]]
    row = np.arange(128) if rows == 128 else np.arange(64) // 16 * 32 + np.arange(64) % 16
    first, column = tensor.at(np.array(to), columns, block, what)
    at = np.ix_(np.array([block]), first + row, column + np.arange(columns))
    if not in_tensor_memory:
        read_a = _shared_operand(g, lane, left, rows, transpose_a, kinds[0], what)
    elif transpose_a:
        raise Unsupported(f"{what}: transposed operand in tensor memory")
    else:
        first_a, column_a = tensor.at(np.array(left), 8, block, what)
        at_a = np.ix_(np.array([block]), first_a + row, column_a + np.arange(8))

        _note_storing(g, at_a, what)

        def read_a() -> Any:
            return elements(tensor.cells[at_a][0], kinds[0])

    read_b = _shared_operand(g, lane, right, columns, transpose_b, kinds[1], what)
    issued = read_a(), read_b()
    _note_storing(g, at, what)

    def matmul() -> None:
        now = read_a(), read_b()
        for name, one, other in zip("AB", issued, now, strict=True):
            if not np.array_equal(one, other, equal_nan=True):
                raise Fault(f"{what}: operand {name} changed between issue and completion")
        if in_tensor_memory:
            tensor.check_operand(tensor.known[at_a], what)
        out = np.matmul(now[0], now[1].T)
        if accumulate:
            tensor.check_operand(tensor.known[at], what)
            out = out + np.ascontiguousarray(tensor.cells[at][0]).view(F32)
        tensor.cells[at] = np.ascontiguousarray(out, F32).view(U32)[None]
        tensor.known[at] = True

    tensor.enqueue(block, matmul)


def _shared_operand(
    g: Lanes, lane: int, descriptor: int, rows: int, transposed: bool, kind: str, what: str
) -> Callable[[], Any]:
    """Check an operand in shared memory; returns what reads it, (rows, k), whenever that is called."""
    mode = descriptor >> 61 & 7
    if mode not in _SPANS or descriptor >> 49 & 7 or descriptor >> 52 & 1:
        raise Unsupported(f"{what}: descriptor {descriptor:#x}")
    address = chunk_addresses(descriptor, _SPANS[mode], np.arange(rows), kind, transposed)
    lanes = np.full(address.size, lane)
    offset = g.shared.offset(flat(address), 16, g.block[lanes], what)
    at = g.shared.granules(offset, 16)
    g.shared.check_operand(at, what)
    g.shared.check_proxy(at, g.block[lanes], g.warp[lanes], what)
    g.shared.check_written(at, g.who[lanes], what)
    return lambda: matrix(g.shared.gather(offset, 16, 4).reshape(*address.shape, 4), kind, transposed)


@rule(r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one\.(?:shared::cluster\.)?b64")
def _commit(t: Translator, match: re.Match[str]) -> Step:
    address = t.address(t.operands[0])

    def commit(g: Lanes, m: Mask) -> None:
        at = address(g)
        for lane in chosen(g, m):
            g.tensor.enqueue(int(g.block[lane]), int(at[lane]))

    return commit
