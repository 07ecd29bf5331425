"""The tables of docs/kernels/static.md, from the stored rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.static.rules import BYTES, OURS, WHOLE, passes, total
from bench.static.survey import PASSES, Row

BYTES_TARGET = "sm_90"
FACTS_TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


def markdown(rows: Sequence[Row]) -> str:
    """Both tables, with their headings."""
    return "\n".join([*_bytes_table(rows), "", *_facts_table(rows)])


def _bytes_table(rows: Sequence[Row]) -> Iterator[str]:
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


def _limit(op: str, rows: Sequence[Row]) -> int:
    """Of the pass; for an op that is compared as a whole, that of backward, which reads and writes everything."""
    return max(row.bytes_limit for row in rows) if op in WHOLE else rows[0].bytes_limit


def _facts_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| op | shape | provider | kernel | " + " | ".join(FACTS_TARGETS) + " |"
    yield "|---" * (4 + len(FACTS_TARGETS)) + "|"
    kernels: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda r: (r.op, r.shape, r.provider != OURS, r.provider, PASSES.index(r.direction))):
        if row.registers is not None:
            kernels.setdefault((row.op, row.shape, row.provider, row.launch.strip("_")), {})[row.target] = row
    for names, targets in kernels.items():
        cells = [_cell(targets[target]) if target in targets else "" for target in FACTS_TARGETS]
        yield f"| {' | '.join([*names, *cells])} |"


def _cell(row: Row) -> str:
    spills = f", spills {row.spills}" if row.spills else ""
    return f"{row.registers} / {row.occupancy:.0%} / {row.width_bits}{spills}"
