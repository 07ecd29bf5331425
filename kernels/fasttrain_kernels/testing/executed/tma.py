"""Bulk copies of tiles between global and shared memory (TMA): cp.async.bulk.tensor, and the tensor maps it reads.

One lane copies a box of a tensor that a tensor map describes. What lies outside of the tensor is filled, or not stored.
Loads announce their bytes to an mbarrier, stores belong to groups that are waited for: until then a tile may neither be
read nor written. Both go through the asynchronous proxy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fasttrain_kernels.testing.executed.descriptors import swizzled
from fasttrain_kernels.testing.executed.memory import GLOBAL_BASE, Fault
from fasttrain_kernels.testing.executed.ptx import Unsupported
from fasttrain_kernels.testing.executed.translate import Mask, Step, Translator, chosen, full, rule
from fasttrain_kernels.testing.executed.values import I64, U32, Array, round_tf32
from fasttrain_kernels.testing.executed.warps import check_whole_warps

if TYPE_CHECKING:
    from fasttrain_kernels.testing.executed.lanes import Lanes

MAP_BYTES = 128
_SPANS = {1: 32, 2: 64, 3: 128}  # bytes of a swizzle's rows, by its code
_SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 9: 8, 10: 2, 11: 4}  # of elements, by their code
TF32 = 11
_NAN = {6: 0x7E00, 7: 0x7FFFFFFF, 9: (1 << 63) - 1, 10: 0x7FFF, 11: 0x7FFFFFFF}
# A tensor map is opaque; here it has, at these bytes (of the first dimension, and from one to the next):
_FIELDS = {
    "global_address": (0, 0), "rank": (8, 0), "elemtype": (12, 0), "global_dim": (16, 4), "global_stride": (40, 8),
    "box_dim": (72, 4), "element_stride": (92, 4), "interleave_layout": (112, 0), "swizzle_mode": (116, 0),
    "fill_mode": (120, 0),
}  # fmt: skip


@dataclass(frozen=True)
class TensorMap:
    """A tensor and the box that is copied; the first dimension is contiguous."""

    address: int
    elemtype: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes, of the other dimensions
    box: tuple[int, ...]
    swizzle: int
    fill: int  # 1: with NaN

    @property
    def size(self) -> int:
        return _SIZES[self.elemtype]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.box)) * self.size

    def encode(self) -> Array:
        """The map as bytes."""
        words = np.zeros(MAP_BYTES, np.uint8)

        def put(field: str, values: tuple[int, ...], kind: str = "u4") -> None:
            at = _FIELDS[field][0]
            raw = np.array(values, kind).view(np.uint8)
            words[at : at + len(raw)] = raw

        put("global_address", (self.address,), "u8")
        put("rank", (len(self.dims) - 1,))
        put("elemtype", (self.elemtype,))
        put("global_dim", self.dims)
        put("global_stride", self.strides, "u8")
        put("box_dim", self.box)
        put("element_stride", (1,) * len(self.dims))
        put("swizzle_mode", (self.swizzle,))
        put("fill_mode", (self.fill,))
        return words

    @staticmethod
    def decode(raw: Array, what: str) -> TensorMap:
        def get(field: str, number: int = 1, kind: str = "u4") -> tuple[int, ...]:
            at = _FIELDS[field][0]
            return tuple(raw[at : at + number * np.dtype(kind).itemsize].view(kind).tolist())

        rank = get("rank")[0] + 1
        if rank > 5 or get("interleave_layout") != (0,) or get("element_stride", rank) != (1,) * rank:
            raise Unsupported(f"{what}: a tensor map of rank {rank}, interleaved or with strides between elements")
        found = TensorMap(
            get("global_address", kind="u8")[0], get("elemtype")[0], get("global_dim", rank),
            get("global_stride", rank - 1, "u8"), get("box_dim", rank), get("swizzle_mode")[0], get("fill_mode")[0],
        )  # fmt: skip
        if found.elemtype not in _SIZES or found.swizzle not in (0, *_SPANS) or found.fill not in (0, 1):
            raise Unsupported(f"{what}: {found}")
        span = found.box[0] * found.size
        if found.address % 16 or any(stride % 16 for stride in found.strides) or span % 16:
            raise Fault(f"{what}: address, strides and rows of a tensor map are multiples of 16 bytes: {found}")
        if span > _SPANS.get(found.swizzle, span) or max(found.box) > 256 or min((*found.box, *found.dims)) < 1:
            raise Fault(f"{what}: a box that no tensor map has: {found}")
        return found

    def tile(self, start: tuple[int, ...]) -> tuple[Array, Array]:
        """The addresses of a box's elements, in the order of shared memory, and which lie inside of the tensor."""
        grids = np.meshgrid(*(np.arange(n) for n in self.box[::-1]), indexing="ij")[::-1]
        address, inside = np.full(grids[0].shape, self.address, I64), np.ones(grids[0].shape, np.bool_)
        for grid, first, dim, stride in zip(grids, start, self.dims, (self.size, *self.strides), strict=True):
            address += (grid + first) * stride
            inside &= (grid + first >= 0) & (grid + first < dim)
        return address.reshape(-1), inside.reshape(-1)


class BulkStores:
    """The stores of one group of lanes: by lane, groups of what completes them; the last one is open."""

    def __init__(self) -> None:
        self.groups: dict[int, list[list[Callable[[], None]]]] = {}

    @property
    def unfinished(self) -> bool:
        return any(any(groups) for groups in self.groups.values())

    def add(self, lane: int, store: Callable[[], None]) -> None:
        self.groups.setdefault(lane, [[]])[-1].append(store)

    def commit(self, lane: int) -> None:
        self.groups.setdefault(lane, [[]]).append([])

    def wait(self, lane: int, pending: int) -> None:
        groups = self.groups.setdefault(lane, [[]])
        while len(groups) - 1 > pending:
            for store in groups.pop(0):
                store()


# Tensor maps that a kernel makes


@rule(rf"tensormap\.replace\.tile\.({'|'.join(_FIELDS)})\.shared::cta\.b1024\.(b32|b64)")
def _replace(t: Translator, match: re.Match[str]) -> Step:
    first, step = _FIELDS[match[1]]
    if step:
        first += t.constant(t.operands[1]) * step
    address, value, what = t.address(t.operands[0]), t.source(t.operands[-1], match[2]), t.what

    def replace(g: Lanes, m: Mask) -> None:
        lanes = chosen(g, m)
        if lanes.size:
            words = np.ascontiguousarray(full(g, value(g))[lanes]).view(U32).reshape(lanes.size, -1)
            for i in range(words.shape[1]):
                at = address(g)[lanes] + first + 4 * i
                g.shared.store(at, words[:, i : i + 1], 4, g.block[lanes], g.who[lanes], what)

    return replace


@rule(r"tensormap\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release\.(?:gpu|cta|sys)\.sync\.aligned")
def _publish(t: Translator, match: re.Match[str]) -> Step:
    to, source, what = t.address(t.operands[0]), t.address(t.operands[1]), t.what
    if t.constant(t.operands[2]) != MAP_BYTES:
        raise t.refuse()

    def copy(g: Lanes, m: Mask) -> None:
        check_whole_warps(g, m, what)
        lanes = chosen(g, m)
        lanes = lanes[g.lane[lanes] == 0]
        if not lanes.size:
            return
        at, start = to(g)[lanes], source(g)[lanes]
        for i in range(0, MAP_BYTES, 16):
            words, undefined = g.shared.load(start + i, 16, 4, g.block[lanes], g.who[lanes], what)
            if undefined is not None:
                g.launch.uninitialised[f"{what} uses it"] += int(undefined.sum())
            g.memory.store(at + i, words, 4, g.who[lanes], what)
        g.memory.unfenced_maps |= set(at.tolist())

    return copy


@rule(r"fence\.proxy\.tensormap::generic\.acquire\.(?:gpu|cta|sys)")
def _acquire(t: Translator, match: re.Match[str]) -> Step:
    address = t.address(t.operands[0])

    def fence(g: Lanes, m: Mask) -> None:
        g.memory.unfenced_maps -= set(address(g)[chosen(g, m)].tolist())

    return fence


@rule(r"cvta\.(param|global)\.u64")
def _generic_address(t: Translator, match: re.Match[str]) -> Step:
    """Only a parameter's address needs a translation: it counts from the start of the arena."""
    write, source = t.target(t.operands[0]), t.source(t.operands[1], "u64")
    base = np.uint64(GLOBAL_BASE if match[1] == "param" else 0)
    return lambda g, m: write(g, source(g) + base, m)


# Copies


_RANK = r"\.([1-5])d"
_TO_SHARED = r"\.shared::(?:cta|cluster)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?"


@rule(rf"cp\.async\.bulk\.tensor{_RANK}{_TO_SHARED}")
def _load(t: Translator, match: re.Match[str]) -> Step:
    to, what, rank = t.address(t.operands[0]), t.what, int(match[1])
    read_map, barrier = _tensor_map(t, t.operands[1].text, 1, rank), t.address(t.operands[2])

    def load(g: Lanes, m: Mask) -> None:
        for lane in chosen(g, m).tolist():
            found, start = read_map(g, lane)
            tile = _Tile(g, lane, int(to(g)[lane]), found, what)
            source, inside = found.tile(start)
            one, block = np.full(len(source), lane), int(g.block[lane])
            fill = _NAN.get(found.elemtype, 0) if found.fill else 0
            values = np.full((len(source), 1), fill, f"u{found.size}")
            values[inside] = g.memory.load(source[inside], found.size, found.size, g.who[one[inside]], what)
            if found.elemtype == TF32:
                values = round_tf32(values)
            g.launch.bytes_read += int(inside.sum()) * found.size
            arrival = g.barriers.at(block, int(barrier(g)[lane]), what)
            arrival.copies.append(tile.begin_load(values, arrival.deliver))
            if g.options.early:
                arrival.copies.pop()()

    return load


@rule(rf"cp\.async\.bulk\.tensor{_RANK}\.global\.shared::cta(?:\.tile)?\.bulk_group(?:\.L2::cache_hint)?")
def _store(t: Translator, match: re.Match[str]) -> Step:
    source, what, rank = t.address(t.operands[1]), t.what, int(match[1])
    read_map = _tensor_map(t, t.operands[0].text, 0, rank)

    def store(g: Lanes, m: Mask) -> None:
        for lane in chosen(g, m).tolist():
            found, start = read_map(g, lane)
            tile = _Tile(g, lane, int(source(g)[lane]), found, what)
            to, inside = found.tile(start)
            issued, who = tile.read(), g.who[np.full(len(to), lane)]

            def complete(
                tile: _Tile = tile, to: Array = to[inside], inside: Array = inside, issued: Array = issued,
                who: Array = who, size: int = found.size,
            ) -> None:  # fmt: skip
                now = tile.read()
                if (now != issued).any():
                    raise Fault(f"{what}: its tile changed before it was waited for")
                g.memory.store(to, now[inside], size, who[inside], what)

            g.launch.bytes_written += int(inside.sum()) * found.size
            g.stores.add(lane, complete)

    return store


@rule(r"cp\.async\.bulk\.commit_group")
def _commit(t: Translator, match: re.Match[str]) -> Step:
    def commit(g: Lanes, m: Mask) -> None:
        for lane in chosen(g, m).tolist():
            g.stores.commit(lane)

    return commit


@rule(r"cp\.async\.bulk\.wait_group(?:\.read)?")
def _wait(t: Translator, match: re.Match[str]) -> Step:
    pending = t.constant(t.operands[0])

    def wait(g: Lanes, m: Mask) -> None:
        for lane in chosen(g, m).tolist():
            g.stores.wait(lane, pending)

    return wait


def _tensor_map(
    t: Translator, text: str, position: int, rank: int
) -> Callable[[Lanes, int], tuple[TensorMap, tuple[int, ...]]]:
    """What reads a lane's map and coordinates, of an operand [map, {coordinates}]."""
    operand, what = t.operands[position], t.what
    address = t.address(operand)
    coordinates = [t.source(part, "s32") for part in t.parts(operand.parts[0], rank)]

    def read(g: Lanes, lane: int) -> tuple[TensorMap, tuple[int, ...]]:
        at = int(address(g)[lane])
        if at in g.memory.unfenced_maps:
            g.launch.unfenced[f"a tensor map without fence.proxy.tensormap -> {what}"] += 1
        start, who = np.arange(at, at + MAP_BYTES, 16), g.who[np.full(MAP_BYTES // 16, lane)]
        raw = g.memory.load(start, 16, 4, who, what).reshape(-1).view(np.uint8)
        return TensorMap.decode(raw, what), tuple(int(full(g, one(g))[lane]) for one in coordinates)

    return read


class _Tile:
    """A box in shared memory, in chunks of 16 bytes."""

    def __init__(self, g: Lanes, lane: int, start: int, found: TensorMap, what: str) -> None:
        self.g, self.what, self.nbytes, self.size = g, what, found.nbytes, found.size
        if start % 128:
            raise Fault(f"{what}: a tile at {start}, which is no multiple of 128 bytes")
        at = start + np.arange(0, found.nbytes, 16)
        if found.swizzle:
            at = swizzled(at, _SPANS[found.swizzle])
        self.lanes = np.full(len(at), lane)
        self.offset = g.shared.offset(at, 16, g.block[self.lanes], what)

    def read(self) -> Array:  # (elements, 1)
        """The elements, checked."""
        g, at = self.g, self.g.shared.granules(self.offset, 16)
        g.shared.check_operand(at, self.what)
        g.shared.check_proxy(at, g.block[self.lanes], g.warp[self.lanes], self.what)
        g.shared.check_read(at, g.who[self.lanes], self.what)
        return np.ascontiguousarray(g.shared.gather(self.offset, 16, 4)).view(f"u{self.size}").reshape(-1, 1)

    def begin_load(self, values: Array, deliver: Callable[[int], None]) -> Callable[[], None]:
        """Nobody may touch the tile until the returned function has put the values there."""
        who = self.g.who[self.lanes]
        self.g.shared.begin_copy(self.offset, 16, who, self.what)

        def complete() -> None:
            words = values.reshape(-1).view(U32).reshape(-1, 4)
            self.g.shared.end_bulk_copy(self.offset, words, who, self.what)
            deliver(self.nbytes)

        return complete
