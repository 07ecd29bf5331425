"""Global and shared memory: every access is checked for bounds, alignment, initialisation and races.

Global memory is an arena of the tensors of a launch, with space between them: what lies outside of a tensor's view
lies outside of all of them, unless another view covers it. Shared memory is that of a batch of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from fasttrain_kernels.testing.executed.hazards import Hazards, identity
from fasttrain_kernels.testing.executed.values import I64, Array

GLOBAL_BASE = 0x7E00_0000_0000  # where the arena's addresses begin
GAP = 1 << 16  # bytes between tensors
_MAX_WARPS = 64


class Fault(RuntimeError):
    """A kernel did what no hardware defines: an address, a race, a barrier that not all reach."""


class CheckedMemory:
    """Bytes with hazards. Offsets are one per lane; subclasses say what an address means."""

    def __init__(self, size: int, granule: int, name: str, *, races: bool, first_wins: bool) -> None:
        self.name, self.granule, self.first_wins = name, granule, first_wins
        self.bytes = np.zeros(max(-(-size // 16) * 16, 16), np.uint8)
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.hazards = Hazards(len(self.bytes) // granule) if races else None
        self.collisions: Counter[str] = Counter()

    def granules(self, offset: Array, width: int) -> Array:  # (lanes,) -> (lanes, granules)
        return (offset // self.granule)[:, None] + np.arange(max(1, width // self.granule))

    def gather(self, offset: Array, width: int, part: int) -> Array:  # -> (lanes, width / part)
        if width == part:
            return self.views[part][offset // part][:, None]
        return self.views[part][(offset // part)[:, None] + np.arange(width // part)]

    def scatter(self, offset: Array, values: Array, part: int, who: Array, what: str) -> None:
        """Store. Of lanes that store different values to one address an undefined one wins: they are counted."""
        at = (offset // part)[:, None] + np.arange(values.shape[1])
        view = self.views[part]
        if self.first_wins:
            view[np.ascontiguousarray(at[::-1])] = np.ascontiguousarray(values[::-1])  # the last assignment stays
        else:
            view[at] = values
        different = view[at] != values
        if different.any():
            lanes = different.any(1)
            for row in at[lanes][:8]:
                if len(np.unique(who[(at == row).all(1)])) > 1:
                    raise Fault(f"{what}: warps store different values to one address of {self.name} memory")
            self.collisions[f"{self.name}: {what}"] += int(lanes.sum())

    def check_read(self, at: Array, who: Array, what: str) -> None:
        if self.hazards is not None:
            conflict = self.hazards.note_read(at, who[:, None])
            if conflict.any():
                self._race(conflict, at, who[:, None], what, self.hazards.written[at])

    def check_written(self, at: Array, who: Array, what: str) -> None:
        """As check_read, for a reader that no later write has to wait for."""
        if self.hazards is not None:
            before = self.hazards.written[at]
            conflict = self.hazards.conflict(before, who[:, None])
            if conflict.any():
                self._race(conflict, at, who[:, None], what, before)

    def check_write(self, at: Array, who: Array, what: str, changes: Callable[[Array], Array] | None) -> None:
        """Writes that change nothing are no race: several warps may hold, and store, the same value."""
        if self.hazards is None:
            return
        read, written = self.hazards.readers(at, who[:, None]), self.hazards.written[at]
        reads, writes = self.hazards.note_write(at, who[:, None])
        if reads.any():
            self._race(reads, at, who[:, None], what, read)
        if writes.any() and (changes is None or (writes & changes(at)).any()):
            self._race(writes, at, who[:, None], what, written)

    def changes(self, offset: Array, values: Array, part: int) -> Callable[[Array], Array]:
        """Which granules a store changes; asked before it happens."""
        different = self.gather(offset, values.shape[1] * part, part) != values

        def of(at: Array) -> Array:
            if part >= self.granule:
                return np.repeat(different, part // self.granule, axis=1)
            return different.reshape(*at.shape, -1).any(2)

        return of

    def _race(self, conflict: Array, at: Array, who: Array, what: str, before: Array) -> None:
        row, column = np.argwhere(conflict)[0]
        now, then = int(np.broadcast_to(who, conflict.shape)[row, column]), int(before[row, column])
        raise Fault(
            f"race in {self.name} memory at byte {at[row, column] * self.granule}: {what} by {identity(now)}, "
            f"after an access by {identity(then)}"
        )


class GlobalArena(CheckedMemory):
    """The tensors of a launch."""

    def __init__(self, size: int, *, races: bool = True, first_wins: bool = False) -> None:
        super().__init__(size, 2, "global", races=races, first_wins=first_wins)
        self.allowed = np.zeros(len(self.bytes), np.bool_)
        self.unfenced_maps: set[int] = set()  # addresses of tensor maps that a kernel has written
        self.hosts: list[
            tuple[int, int, int]
        ] = []  # address on the CPU, bytes, offset: of what pointers in memory mean
        self.only_blocks = False  # check races between blocks only: of specialised warps, nothing else is known here

    def offset(self, address: Array, width: int, what: str) -> Array:
        offset = address.astype(I64) - GLOBAL_BASE
        for start, nbytes, here in self.hosts:
            at = address.astype(I64) - start
            offset = np.where((at >= 0) & (at < nbytes), at + here, offset)
        inside = (offset >= 0) & (offset + width <= len(self.bytes))
        if inside.all():
            inside = self.allowed[offset] & self.allowed[offset + (width - 1)]
        if not inside.all():
            first = offset[np.argmin(inside)]
            raise Fault(f"{what}: {np.sum(~inside)} lanes outside of all tensors, first at {first:+,} of the arena")
        if (offset % width).any():
            raise Fault(f"{what}: misaligned global address")
        return offset

    def load(self, address: Array, width: int, part: int, who: Array, what: str) -> Array:
        offset = self.offset(address, width, what)
        if width > 1:  # bytes have no hazards: two lanes may share a granule
            self.check_read(self.granules(offset, width), self._identity(who), what)
        return self.gather(offset, width, part)

    def _identity(self, who: Array) -> Array:
        return who >> 40 << 40 | 1 << 8 if self.only_blocks else who

    def store(self, address: Array, values: Array, part: int, who: Array, what: str) -> None:
        width = values.shape[1] * part
        offset = self.offset(address, width, what)
        if width > 1:
            identity = self._identity(who)
            self.check_write(self.granules(offset, width), identity, what, self.changes(offset, values, part))
        self.scatter(offset, values, part, who, what)


class SharedMemory(CheckedMemory):
    """The shared memory of a batch of blocks, one after the other. An address counts from its block's window.

    Writes reach the asynchronous proxy, through which wgmma and tcgen05 read, by a proxy fence of the writer or of the
    reader; `clock` orders writes and fences as they are executed.
    """

    def __init__(
        self, size: int, blocks: int, granule: int, *, base: int = 1024, races: bool = True,
        first_wins: bool = False, poison: int = 0xA5,
    ) -> None:  # fmt: skip
        self.size, self.base = size, base
        self.stride = -(-max(size, 16) // 16) * 16
        super().__init__(self.stride * blocks, granule, "shared", races=races, first_wins=first_wins)
        self.bytes[:] = poison
        granules = len(self.bytes) // granule
        self.known = np.zeros(granules, np.bool_)
        self.in_flight = np.zeros(granules, np.bool_)  # destination of a copy that nobody has waited for
        self.uninitialised: Counter[str] = Counter()
        self.unfenced: Counter[str] = Counter()
        self._clock = 1
        self._written_at = np.zeros(granules, I64)
        self._written_by = np.zeros(granules, np.int16)
        self._copied = np.zeros(granules, np.bool_)  # by cp.async
        self._fenced_at = np.zeros((blocks, _MAX_WARPS), I64)

    def offset(self, address: Array, width: int, block: Array, what: str) -> Array:
        at = address.astype(I64) - self.base
        inside = (at >= 0) & (at + width <= self.size)
        if not inside.all():
            first = at[np.argmin(inside)]
            raise Fault(f"{what}: shared address {first} (+{width}) outside of the block's {self.size} bytes")
        if (at % width).any():
            raise Fault(f"{what}: misaligned shared address")
        return at + block * self.stride

    def load(
        self, address: Array, width: int, part: int, block: Array, who: Array, what: str
    ) -> tuple[Array, Array | None]:
        """Return the values, and the lanes that read what nobody wrote."""
        offset = self.offset(address, width, block, what)
        at = self.granules(offset, width)
        undefined = self.check_arrived(at, what)
        self.check_read(at, who, what)
        return self.gather(offset, width, part), undefined

    def store(
        self, address: Array, values: Array, part: int, block: Array, who: Array, what: str,
        undefined: Array | None = None,
    ) -> None:  # fmt: skip
        """Store; `undefined` are the lanes whose values are."""
        width = values.shape[1] * part
        offset = self.offset(address, width, block, what)
        changes = self.changes(offset, values, part) if self.hazards is not None else None
        at = self.granules(offset, width)
        self._note_write(at, who, what, changes)
        if undefined is not None:
            self.known[at[undefined]] = False
        self.scatter(offset, values, part, who, what)

    def check_arrived(self, at: Array, what: str) -> Array | None:
        """Return the lanes that read what nobody wrote, if there are any."""
        if self.in_flight[at].any():
            raise Fault(f"{what}: reads shared memory that an asynchronous copy is still writing")
        known = self.known[at].all(1)
        return None if known.all() else np.logical_not(known)

    def check_operand(self, at: Array, what: str) -> None:
        """As check_arrived, for operands of matmuls, which have to be initialised."""
        undefined = self.check_arrived(at, what)
        if undefined is not None:
            self.uninitialised[f"{what} reads an operand that nobody wrote"] += int(undefined.sum())

    def _note_write(self, at: Array, who: Array, what: str, changes: Callable[[Array], Array] | None = None) -> None:
        if self.in_flight[at].any():
            raise Fault(f"{what}: writes shared memory that an asynchronous copy is still writing")
        self.known[at] = True
        self._stamp(at, who, copied=False)
        self.check_write(at, who, what, changes)

    # Asynchronous copies: their bytes arrive when they are waited for

    def begin_copy(self, offset: Array, width: int, who: Array, what: str) -> None:
        at = self.granules(offset, width)
        self._note_write(at, who, what)
        self.in_flight[at] = True

    def end_copy(self, offset: Array, values: Array, who: Array, what: str) -> None:
        at = self.granules(offset, values.shape[1] * 4)
        self.in_flight[at] = False
        self._stamp(at, who, copied=True)
        if self.hazards is not None:
            self.hazards.written[at] = who[:, None]
        self.scatter(offset, values, 4, who, what)

    def end_bulk_copy(self, offset: Array, values: Array, who: Array, what: str) -> None:
        """As end_copy, of a copy through the asynchronous proxy, which an mbarrier orders before all that follows."""
        at = self.granules(offset, values.shape[1] * 4)
        self.in_flight[at] = False
        self._written_at[at] = 0
        if self.hazards is not None:
            self.hazards.written[at] = 0
        self.scatter(offset, values, 4, who, what)

    # The asynchronous proxy

    def _stamp(self, at: Array, who: Array, *, copied: bool) -> None:
        self._clock += 1
        self._copied[at] = copied
        self._written_at[at] = self._clock
        self._written_by[at] = (who & 0xFF)[:, None]

    def fence(self, block: Array, warp: Array) -> None:
        self._clock += 1
        self._fenced_at[block, warp] = self._clock

    def check_proxy(self, at: Array, block: Array, warp: Array, what: str) -> None:
        """Count operands that were written, and not fenced since."""
        by_writer, by_reader = self._fenced_at[block[:, None], self._written_by[at]], self._fenced_at[block, warp]
        late = np.maximum(by_writer, by_reader[:, None]) < self._written_at[at]
        if late.any():
            for writer, some in (("cp.async", late & self._copied[at]), ("st.shared", late & ~self._copied[at])):
                if some.any():
                    self.unfenced[f"{writer} -> {what}"] += int(some.sum())
