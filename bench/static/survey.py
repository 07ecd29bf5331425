"""Rows of the table: each launch of a case, counted at full size and compiled for a target."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.static.cases import Backward, Case, Sizes
from bench.static.counts import Counts, extrapolate, flat, unflat
from bench.static.gpus import CARDS
from bench.static.prediction import predicted_us
from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.testing import Launch, Traffic, interpret
from fasttrain_kernels.testing.compiled import Facts, RecordedLaunch, record
from fasttrain_kernels.testing.targets import TARGETS

PASSES = ("forward", "backward")
_MOST = 0.9  # of the bytes of a kernel, by instructions: the rest are values per row


@dataclass(frozen=True, kw_only=True)
class Row:
    """One launch on one target. None: it is an operation of torch, of which nothing is compiled."""

    op: str
    # "pass" in JSON
    direction: str
    provider: str
    shape: str
    dtype: str
    target: str
    launch: str
    bytes_issued: int
    bytes_unique: int
    bytes_limit: int  # of the whole pass
    flops: int
    special: int
    registers: int | None
    spills: int | None
    shared: int | None
    shared_limit: int
    occupancy: float | None
    limiter: str | None
    width_bits: int | None
    matrix: dict[str, int]
    predicted_us: list[float]

    def plain(self) -> dict[str, Any]:
        return {"pass" if name == "direction" else name: value for name, value in asdict(self).items()}


def survey(case: Case, target: str) -> list[Row]:
    """The rows of a case."""
    sizes = case.shape.full | dict(SMS=CARDS[target].multiprocessors)
    launched = _recorded(case, sizes, target)
    rows = []
    for direction in PASSES:
        kernels = [launch for launch in launched[direction] if isinstance(launch, RecordedLaunch)]
        programs = math.prod(kernels[0].grid) if kernels else 0
        memory = TARGETS[target].shared_per_block if case.shape.by_memory else None
        counted = iter(_counts(case, direction, sizes, programs, memory))
        for launch in launched[direction]:
            if isinstance(launch, Counts):
                rows.append(_row(case, direction, target, launch, None, programs=1))
            else:
                counts = next(counted)
                assert counts.kernel == launch.kernel, f"{counts.kernel} was interpreted, {launch.kernel} recorded"
                rows.append(_row(case, direction, target, counts, launch.facts, programs=math.prod(launch.grid)))
    return rows


def _row(case: Case, direction: str, target: str, counts: Counts, facts: Facts | None, *, programs: int) -> Row:
    card, limits = CARDS[target], TARGETS[target]
    held = facts.occupancy if facts else None
    return Row(
        op=case.shape.op,
        direction=direction,
        provider=case.provider,
        shape=case.shape.name,
        dtype="bf16",
        target=target,
        launch=counts.kernel,
        bytes_issued=counts.issued,
        bytes_unique=counts.unique,
        bytes_limit=case.shape.limits[direction],
        flops=counts.flops + counts.elementwise,
        special=counts.special,
        registers=facts.registers if facts else None,
        spills=facts.spill_stores + facts.spill_loads if facts else None,
        shared=facts.shared if facts else None,
        shared_limit=limits.shared_per_block,
        occupancy=held.share if held else None,
        limiter=held.limiter if held else None,
        width_bits=width(facts) if facts else None,
        matrix=dict(sorted(facts.matrix.items())) if facts else {},
        predicted_us=predicted_us(counts, card, programs=programs, resident=max(1, held.blocks) if held else 1),
    )


def width(facts: Facts) -> int:
    """The bits per lane that nine tenths of the global bytes, by instructions, move in at least."""
    widths: Counter[int] = Counter({128: facts.tma})
    for accesses in (facts.loads, facts.stores, facts.copies):
        widths.update(accesses)
    total, wide = sum(bits * count for bits, count in widths.items()), 0
    for bits in sorted(widths, reverse=True):
        wide += bits * widths[bits]
        if wide >= _MOST * total:
            return bits
    raise ValueError(f"{facts.kernel} on {facts.target} accesses no global memory")


# At full size, compiled and not run


def _recorded(case: Case, sizes: Sizes, target: str) -> dict[str, list[RecordedLaunch | Counts]]:
    """Launches and operations of torch, by pass."""
    with kernels_on_cpu(multiprocessors=sizes["SMS"]), record(target) as launches, _TorchOps(launches) as noted:
        return _by_pass(case, sizes, noted.events, target)


class _TorchOps(TorchDispatchMode):
    """Notes operations of torch between launches: a sum, a cast, a fill. Matrix products are left to BLAS."""

    def __init__(self, launches: list[RecordedLaunch]) -> None:
        super().__init__()
        self._launches = launches
        self._taken = 0
        self._events: list[RecordedLaunch | Counts] = []

    def events(self) -> list[RecordedLaunch | Counts]:
        """Everything so far, in order."""
        self._events += self._launches[self._taken :]
        self._taken = len(self._launches)
        return self._events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.events()
        result = func(*args, **(kwargs or {}))
        counts = _torch_counts(func, [*args, *(kwargs or {}).values()], result)
        if counts.issued:
            self.events().append(counts)
        return result


def _torch_counts(func: Any, args: Iterable[Any], result: Any) -> Counts:
    """Bytes of an operation: its inputs read, its outputs written. Views and allocations move none."""
    inputs, outputs = ([x for x in tree_leaves(xs) if isinstance(x, Tensor)] for xs in (list(args), result))
    name = func.overloadpacket.__name__
    counts = Counts(f"torch {name}")
    moves = func.namespace == "aten" and not func.is_view and not name.startswith("empty")
    if moves and name not in ("mm", "addmm", "bmm", "detach", "_local_scalar_dense"):
        written = [x for x in inputs if name.endswith("_")][:1] or outputs
        read = [x for x in inputs if not (name.endswith("_") and name in ("zero_", "fill_") and x is inputs[0])]
        counts.arguments.update({f"in{i}": Traffic(loaded=x.nbytes, unique=x.nbytes) for i, x in enumerate(read)})
        counts.arguments.update({f"out{i}": Traffic(stored=x.nbytes, unique=x.nbytes) for i, x in enumerate(written)})
    return counts


def _by_pass(case: Case, sizes: Sizes, events: Callable[[], list[Any]], target: str) -> dict[str, list[Any]]:
    """Run a case, and split what it launched into passes."""
    with _as_if_on(case, target):
        prepared = len(events())
        backward: Backward | None = case.run(sizes)
        middle = len(events())
        if backward is not None:
            backward()
    everything = events()
    return {"forward": everything[prepared:middle], "backward": everything[middle:]}


@contextlib.contextmanager
def _as_if_on(case: Case, target: str) -> Iterator[None]:
    if case.provider == "liger":
        from bench.static.liger import as_if_on

        with as_if_on(target):
            yield
    else:
        yield


# At small sizes, interpreted


@cache
def _interpreted(case: Case, memory: int | None) -> list[tuple[Sizes, dict[str, list[Launch]]]]:
    """The small runs of a case: their sizes, and their launches by pass."""
    runs = []
    for sizes in case.shape.small:
        simulated = kernels_on_cpu(multiprocessors=sizes["SMS"], shared_memory=memory)
        with simulated, interpret(poison=False, locks=case.locks) as launches:
            runs.append((sizes, _by_pass(case, sizes, lambda launches=launches: launches, "sm_90")))
    return runs


def _counts(case: Case, direction: str, sizes: Sizes, programs: int, memory: int | None) -> list[Counts]:
    """The counts of each launch of a pass at full size, of which the first has so many programs."""
    runs = [(small, launches[direction]) for small, launches in _interpreted(case, memory)]
    points = [case.shape.terms(small, math.prod(ls[0].grid), direction) for small, ls in runs if ls]
    full = case.shape.terms(sizes, programs, direction)
    found = []
    for same in zip(*(launches for _, launches in runs), strict=True):
        figures = extrapolate(points, [flat(launch) for launch in same], full)
        found.append(unflat(same[0].kernel, list(same[0].arguments), figures))
    return found
