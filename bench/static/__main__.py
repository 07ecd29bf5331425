"""Bytes, operations and resources of our kernels, Liger's and cut-cross-entropy's at training shapes, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence

import triton
from rich.console import Console
from rich.table import Table

from bench.static import rules
from bench.static.cases import OURS
from bench.static.gpus import CARDS
from bench.static.providers import survey_all, version
from bench.static.summary import TABLES, markdown
from bench.static.survey import PASSES, StaticRow

_EPILOGUE = """\
columns:
  issued           MB that the lanes ask for; x: times the limit of the pass
  memory, LRU      MB that pass L2: a perfect one, and one that evicts the least recently used block
  unique           distinct MB of each launch: what would pass an infinite cache
  GFLOP, M special operations; special: exp, log, rsqrt
  regs, spill      registers per lane, bytes spilled per lane        smem   KiB of shared memory
  occ, limit       resident warps of those that fit, and what keeps it from more
  bits             width of an access, per lane        mma    tensor core instructions
  mma x            matmul FLOPs that tensor cores execute, of those needed: above 1, warps repeat each other's work
  predicted us     low, mid, high by a roofline: not measured

Without --check or --update, the stored table is shown. The exit status of --check is 1 if an exact figure is not the
stored one, a kernel of ours spills or repeats matmuls, or one moves more bytes, or narrower ones, than a baseline.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    stored = [] if options.update and not rules.STORED.exists() else _wanted(rules.read(), options)
    if not (options.check or options.update):
        _show(console, stored, options.json)
        return 0
    fresh = survey_all(options.op, options.target, options.jobs)
    surveyed = {row.provider for row in fresh}
    kept = [row for row in stored if row.provider not in surveyed]  # of baselines that are not installed
    found = rules.problems([*fresh, *kept])
    if options.update:
        _update(fresh)
    elif rules.stored_triton() == triton.__version__:
        found += rules.changes(fresh, stored)
    _show(console, [*fresh, *kept], options.json)
    for text in found:
        console.print(text, style="red", highlight=False, markup=False)
    if not options.json:
        print(f"{len(fresh)} rows of {', '.join(sorted(surveyed))}; {len(found)} problems; triton {triton.__version__}")
    return 1 if found else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.static",
        description=__doc__,
        epilog=_EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ops = list(dict.fromkeys(case.shape.op for case in OURS))
    parser.add_argument("--target", nargs="+", choices=CARDS, default=list(CARDS), metavar="T", help=", ".join(CARDS))
    parser.add_argument("--op", nargs="+", choices=ops, default=ops, metavar="OP", help=", ".join(ops))
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="compute the table anew, and compare it with the stored")
    parser.add_argument(
        "--update", action="store_true", help=f"compute and store it in {rules.STORED.name} and {TABLES.name}"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    options = parser.parse_args(arguments)
    if not options.update and not rules.STORED.exists():
        parser.error(f"there is no {rules.STORED}; --update computes and stores it")
    return options


def _wanted(rows: Iterable[StaticRow], options: argparse.Namespace) -> list[StaticRow]:
    return [row for row in rows if row.target in options.target and row.op in options.op]


def _update(fresh: Sequence[StaticRow]) -> None:
    """Replace what was surveyed, and keep the rest."""
    surveyed = {(row.provider, row.op, row.target) for row in fresh}
    old = json.loads(rules.STORED.read_text()) if rules.STORED.exists() else []
    kept = [row for row in old if (row["provider"], row["op"], row["target"]) not in surveyed]
    rules.write(kept + rules.plain(fresh, version))
    TABLES.write_text(markdown(rules.read()))


# Showing


def _show(console: Console, rows: Sequence[StaticRow], as_json: bool) -> None:
    if as_json:
        print(json.dumps([row.plain() for row in rows], indent=1))
        return
    for target in dict.fromkeys(row.target for row in rows):
        here = sorted((r for r in rows if r.target == target), key=lambda r: (r.op, r.shape))
        console.print(
            f"\n{target}, {CARDS[target].gpu.name}: static, no GPU was used; times are predicted", style="bold"
        )
        for (op, shape), same in rules.grouped(here):
            console.print(_table(f"{op} {shape}", same))


def _table(title: str, rows: Sequence[StaticRow]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in ("provider", "pass", "launch"):
        table.add_column(name, overflow="fold")
    moved = [name for figure in ("issued", "memory", "LRU", "unique") for name in (figure, "x")]
    for name in (*moved, "GFLOP", "M special", "regs", "spill", "smem", "occ"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("limit", "bits", "mma", "mma x"):
        table.add_column(name, no_wrap=True)
    table.add_column("predicted us", justify="right", no_wrap=True)
    for direction in PASSES:
        for provider in dict.fromkeys(row.provider for row in rows):
            same = [row for row in rows if (row.provider, row.direction) == (provider, direction)]
            for row in same:
                table.add_row(*_cells(row), style="red" if row.spills else None)
            if len(same) > 1:
                table.add_row(provider, direction, "all", *_sums(same), style="bold")
    return table


def _cells(row: StaticRow) -> list[str]:
    compiled = row.registers is not None
    return [
        row.provider,
        row.direction,
        row.launch.removeprefix("_") + (f" x{row.launches}" if row.launches > 1 else ""),
        *(cell for figure in rules.BYTES for cell in _bytes(getattr(row, figure), row.bytes_limit)),
        f"{row.flops / 1e9:.4g}",
        f"{row.special / 1e6:.4g}",
        str(row.registers) if compiled else "",
        str(row.spills) if compiled else "",
        f"{(row.shared or 0) / 1024:.3g}/{row.shared_limit // 1024}" if compiled else "",
        f"{row.occupancy:.0%}" if compiled else "",
        row.limiter or "",
        str(row.width_bits or ""),
        " ".join(f"{name}:{count}" for name, count in row.matrix.items()),
        "" if row.mma_ratio is None else f"{row.mma_ratio:.2f}",
        _time(row.predicted_us),
    ]


def _sums(rows: Sequence[StaticRow]) -> list[str]:
    limit = rows[0].bytes_limit
    times = [sum(row.predicted_us[i] for row in rows) for i in range(3)]
    moved = [cell for figure in rules.BYTES for cell in _bytes(rules.total(rows, figure), limit)]
    flops, special = (rules.total(rows, figure) for figure in ("flops", "special"))
    figures = [*moved, f"{flops / 1e9:.4g}", f"{special / 1e6:.4g}"]
    return [*figures, *[""] * 8, _time(times)]


def _bytes(count: int, limit: int) -> tuple[str, str]:
    return f"{count / 1e6:,.5g}", f"{count / limit:.2f}"


def _time(times: Sequence[float]) -> str:
    low, mid, high = times
    return f"{low:,.0f} {mid:,.0f} {high:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
