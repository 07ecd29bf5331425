"""Rows of the table: each launch of a case, counted at full size and compiled for a target."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from bench.static.cache import memory_bytes
from bench.static.cases import Sizes, StaticCase
from bench.static.counts import Counts, extrapolate, flat, unflat
from bench.static.gpus import CARDS
from bench.static.prediction import predicted_us
from bench.static.torch_ops import TorchOps
from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.testing import Launch, execute, interpret
from fasttrain_kernels.testing.compiled import KernelMetadata, RecordedLaunch, record
from fasttrain_kernels.testing.targets import TARGETS

PASSES = ("forward", "backward")
_WIDE_SHARE = 0.9  # of the bytes of a kernel, by instructions: the rest are values per row


@dataclass(frozen=True, kw_only=True)
class StaticRow:
    """One kernel of one pass on one target, all its launches together. None: torch runs it, nothing is compiled."""

    op: str
    direction: str  # "pass" in JSON
    provider: str
    shape: str
    dtype: str
    target: str
    launch: str
    launches: int
    bytes_issued: int
    bytes_memory: int  # past a perfect L2
    bytes_lru: int  # past an LRU L2
    bytes_unique: int
    bytes_limit: int  # of the whole pass
    flops: int
    special: int
    registers: int | None
    spills: int | None  # bytes per lane, stored and loaded
    shared: int | None
    shared_limit: int
    occupancy: float | None
    limiter: str | None
    width_bits: int | None
    matrix: dict[str, int]
    predicted_us: list[float]
    mma_ratio: float | None = None  # FLOPs that tensor cores execute, of those that the source needs; ours on NVIDIA

    def plain(self) -> dict[str, Any]:
        return {"pass" if name == "direction" else name: value for name, value in asdict(self).items()}

    @staticmethod
    def of(plain: dict[str, Any]) -> StaticRow:
        return StaticRow(**{"direction" if name == "pass" else name: value for name, value in plain.items()})


def survey(case: StaticCase, target: str) -> list[StaticRow]:
    """Return the rows of a case on a target."""
    sizes = case.shape.full | dict(SMS=CARDS[target].multiprocessors)
    rows: dict[tuple[str, str], StaticRow] = {}
    recorded = _recorded(case, sizes, target)
    ratios = _mma_ratios(case, target) if _uses_tensor_cores(case, recorded, target) else {}
    for direction, events in recorded.items():
        first = next((event for event in events if isinstance(event, RecordedLaunch)), None)
        for number, event in enumerate(events):
            if isinstance(event, Counts):
                row = _row(case, direction, target, event, None, programs=1)
            else:
                before = sum(isinstance(e, RecordedLaunch) for e in events[:number])
                assert first is not None
                programs = math.prod((event if case.small_run else first).grid)
                counts = _counts(case, direction, before, sizes, programs, target)
                assert counts.kernel == event.kernel, f"{counts.kernel} was interpreted, {event.kernel} recorded"
                row = _row(case, direction, target, counts, event.metadata, programs=math.prod(event.grid))
                row = replace(row, mma_ratio=ratios.get((direction, event.kernel)))
            key = (direction, row.launch)
            rows[key] = _sum(rows[key], row) if key in rows else row
    return list(rows.values())


def _row(
    case: StaticCase, direction: str, target: str, counts: Counts, metadata: KernelMetadata | None, *, programs: int
) -> StaticRow:
    held = metadata.occupancy if metadata else None
    launched = dict(programs=programs, resident=held.blocks if held else 1)
    return StaticRow(
        op=case.shape.op,
        direction=direction,
        provider=case.provider,
        shape=case.shape.name,
        dtype="bf16",
        target=target,
        launch=counts.kernel,
        launches=1,
        bytes_issued=counts.issued,
        bytes_memory=memory_bytes(counts, CARDS[target], "perfect", **launched),
        bytes_lru=memory_bytes(counts, CARDS[target], "lru", **launched),
        bytes_unique=counts.unique,
        bytes_limit=case.shape.limits[direction],
        flops=counts.flops + counts.elementwise,
        special=counts.special,
        registers=metadata.registers if metadata else None,
        spills=metadata.spill_stores + metadata.spill_loads if metadata else None,
        shared=metadata.shared if metadata else None,
        shared_limit=TARGETS[target].shared_per_block,
        occupancy=round(held.share, 4) if held else None,
        limiter=held.limiter if held else None,
        width_bits=width(metadata) if metadata else None,
        matrix=dict(sorted(metadata.matrix.items())) if metadata else {},
        predicted_us=predicted_us(counts, CARDS[target], **launched),
    )


def _sum(row: StaticRow, other: StaticRow) -> StaticRow:
    """Two launches of a kernel as one row; of two binaries, what the worse one needs."""
    both = (row, other)
    added = ("launches", "bytes_issued", "bytes_memory", "bytes_lru", "bytes_unique", "flops", "special")
    figures: dict[str, Any] = {name: sum(getattr(r, name) for r in both) for name in added}
    figures["predicted_us"] = [round(sum(times), 2) for times in zip(*(r.predicted_us for r in both), strict=True)]
    if row.registers is not None:
        emptier = min(both, key=lambda r: r.occupancy or 0)
        figures |= {name: max(getattr(r, name) for r in both) for name in ("registers", "spills", "shared")}
        figures |= dict(occupancy=emptier.occupancy, limiter=emptier.limiter)
        figures["width_bits"] = min(r.width_bits or 0 for r in both)
    return replace(row, **figures)


def width(metadata: KernelMetadata) -> int:
    """The bits per lane that nine tenths of the global bytes, by instructions, move in at least."""
    widths: Counter[int] = Counter({128: metadata.tma})
    for accesses in (metadata.loads, metadata.stores, metadata.copies):
        widths.update(accesses)
    total, wide = sum(bits * count for bits, count in widths.items()), 0
    for bits in sorted(widths, reverse=True):
        wide += bits * widths[bits]
        if wide >= _WIDE_SHARE * total:
            return bits
    raise ValueError(f"{metadata.kernel} on {metadata.target} accesses no global memory")


# At full size, compiled and not run


def _recorded(case: StaticCase, sizes: Sizes, target: str) -> dict[str, list[RecordedLaunch | Counts]]:
    """Launches and operations of torch, by pass."""
    with kernels_on_cpu(multiprocessors=sizes["SMS"]), record(target) as launches, TorchOps(launches) as noted:
        return _by_pass(case.run, case.provider, sizes, noted.events, target)


def _by_pass(
    run: Callable[[Sizes], Any], provider: str, sizes: Sizes, events: Callable[[], list[Any]], target: str
) -> dict[str, list[Any]]:
    """Run a case, and split what it launched into passes."""
    with _as_if_on(provider, target):
        backward = run(sizes)
        middle = len(events())
        if backward is not None:
            backward()
    everything = events()
    return {"forward": everything[:middle], "backward": everything[middle:]}


def _as_if_on(provider: str, target: str) -> contextlib.AbstractContextManager[None]:
    if provider != "liger":
        return contextlib.nullcontext()
    from bench.static.liger import as_if_on

    return as_if_on(target)


# At small sizes, interpreted


def _alike(case: StaticCase, target: str) -> str:
    """A target on which the case launches the same kernels with the same tiles, and which stands for many."""
    if case.by_target:
        return target
    memory = TARGETS[target].shared_per_block
    alike = [name for name, other in TARGETS.items() if not case.shape.by_memory or other.shared_per_block == memory]
    return alike[0]


@cache
def _interpreted(case: StaticCase, target: str) -> list[tuple[Sizes, dict[str, list[Launch]]]]:
    """The small runs of a case: their sizes, and their launches by pass."""
    return list(_interpret(case, target))


def _interpret(case: StaticCase, target: str) -> Iterator[tuple[Sizes, dict[str, list[Launch]]]]:
    run, memory = case.small_run or case.run, TARGETS[target].shared_per_block
    for sizes in case.small or case.shape.small:
        simulated = kernels_on_cpu(multiprocessors=sizes["SMS"], shared_memory=memory)
        with simulated, interpret(poison=False, locks=case.locks) as launches:
            yield sizes, _by_pass(run, case.provider, sizes, partial(list, launches), target)


# At small sizes, executed


def _uses_tensor_cores(case: StaticCase, recorded: dict[str, list[RecordedLaunch | Counts]], target: str) -> bool:
    launches = [event for events in recorded.values() for event in events if isinstance(event, RecordedLaunch)]
    ours = case.provider == "fasttrain" and TARGETS[target].backend == "cuda"
    return ours and any(launch.metadata.matrix for launch in launches)


def _mma_ratios(case: StaticCase, target: str) -> dict[tuple[str, str], float]:
    """What tensor cores execute, by pass and kernel, in units of what the source needs. 1.5: warps repeat a half."""
    sizes, needed = _interpreted(case, _alike(case, target))[0]
    with execute(target, multiprocessors=sizes["SMS"], races=False, bank_conflicts=False) as launches:
        executed = _by_pass(case.run, case.provider, sizes, partial(list, launches), target)
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for direction in PASSES:
        for source, binary in zip(needed[direction], executed[direction], strict=True):
            assert source.kernel == binary.kernel
            flops, executed_flops = found.get((direction, source.kernel), (0, 0))
            found[direction, source.kernel] = flops + source.flops, executed_flops + binary.mma_flops
    return {key: round(executed_flops / flops, 4) for key, (flops, executed_flops) in found.items() if flops}


def _counts(case: StaticCase, direction: str, number: int, sizes: Sizes, programs: int, target: str) -> Counts:
    """The counts of a launch of a pass at full size."""
    terms = case.terms or case.shape.terms
    points, values = [], []
    for small, launches in _interpreted(case, _alike(case, target)):
        launched = launches[direction]
        same = launched[0 if case.small_run else number]  # a case with a small run of its own repeats one kernel
        points.append(terms(small, math.prod((same if case.small_run else launched[0]).grid), direction))
        values.append(flat(same))
    counts = unflat(same.kernel, list(same.arguments), extrapolate(points, values, terms(sizes, programs, direction)))
    tiling = case.tilings.get(same.kernel)
    return replace(counts, tilings=(tiling(sizes),)) if tiling else counts
