"""bench/results/static.md: tables of the stored rows, written by python -m bench.static --update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.static.gpus import CARDS
from bench.static.rules import BYTES, OURS, STORED, WHOLE, passes, total
from bench.static.survey import PASSES, StaticRow

TABLES = STORED.with_suffix(".md")
BYTES_TARGET = "sm_90"
METADATA_TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


_HEAD = """# Static analysis: tables

Written by `python -m bench.static --update`; [how to read it](../../docs/kernels/static.md).
No GPU was used: bytes, FLOPs and resources are exact, times are predicted.

## Bytes on an H100 (sm_90), in multiples of the limit
"""
_MIDDLE = """
## Registers / occupancy / bits of an access
"""
_END = """
## Linear cross-entropy: GB past a perfect L2, past an LRU L2
"""


def markdown(rows: Sequence[StaticRow]) -> str:
    """The whole file."""
    return "\n".join([_HEAD, *_bytes_table(rows), _MIDDLE, *_metadata_table(rows), _END, *_l2_table(rows), ""])


def _bytes_table(rows: Sequence[StaticRow]) -> Iterator[str]:
    yield "| op | shape | pass | provider | issued | memory | LRU | unique | GFLOP | predicted us |"
    yield "|---" * 10 + "|"
    here = passes(row for row in rows if row.target == BYTES_TARGET)
    for (op, shape, _, direction), providers in here.items():
        for provider, same in sorted(providers.items(), key=lambda item: (item[0] != OURS, item[0])):
            limit = _limit(op, same)
            moved = " | ".join(f"{total(same, figure) / limit:.3f}" for figure in BYTES)
            times = " ".join(f"{sum(row.predicted_us[i] for row in same):,.0f}" for i in range(3))
            flops = f"{total(same, 'flops') / 1e9:,.3g}"
            yield f"| {op} | {shape} | {direction} | {provider} | {moved} | {flops} | {times} |"


def _limit(op: str, rows: Sequence[StaticRow]) -> int:
    """The limit of the pass; for an op that is compared as a whole, that of backward, which moves everything."""
    return max(row.bytes_limit for row in rows) if op in WHOLE else rows[0].bytes_limit


def _metadata_table(rows: Sequence[StaticRow]) -> Iterator[str]:
    yield "| op | shape | provider | kernel | " + " | ".join(METADATA_TARGETS) + " |"
    yield "|---" * (4 + len(METADATA_TARGETS)) + "|"
    kernels: dict[tuple[str, ...], dict[str, StaticRow]] = {}
    for row in sorted(rows, key=lambda r: (r.op, r.shape, r.provider != OURS, r.provider, PASSES.index(r.direction))):
        if row.registers is not None:
            kernels.setdefault((row.op, row.shape, row.provider, row.launch.strip("_")), {})[row.target] = row
    for names, targets in kernels.items():
        cells = [_cell(targets[target]) if target in targets else "" for target in METADATA_TARGETS]
        yield f"| {' | '.join([*names, *cells])} |"


def _cell(row: StaticRow) -> str:
    spills = f", spills {row.spills}" if row.spills else ""
    return f"{row.registers} / {row.occupancy:.0%} / {row.width_bits}{spills}"


def _l2_table(rows: Sequence[StaticRow]) -> Iterator[str]:
    targets = list(dict.fromkeys(row.target for row in rows if row.op in WHOLE))
    targets.sort(key=list(CARDS).index)
    yield "| shape | provider | " + " | ".join(CARDS[target].gpu.name for target in targets) + " |"
    yield "|---" * (2 + len(targets)) + "|"
    groups: dict[tuple[str, str], dict[str, list[StaticRow]]] = {}
    for row in rows:
        if row.op in WHOLE:
            groups.setdefault((row.shape, row.provider), {}).setdefault(row.target, []).append(row)
    for names, by_target in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] != OURS, item[0][1])):
        cells = [_gigabytes(by_target.get(target, [])) for target in targets]
        yield f"| {' | '.join([*names, *cells])} |"


def _gigabytes(rows: Sequence[StaticRow]) -> str:
    return ", ".join(f"{total(rows, figure) / 1e9:.1f}" for figure in ("bytes_memory", "bytes_lru")) if rows else ""
