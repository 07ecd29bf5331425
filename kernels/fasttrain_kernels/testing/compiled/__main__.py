"""Compile every kernel that fasttrain ships, without a GPU, and print its resources on each target."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fasttrain_kernels.testing.compiled import rules
from fasttrain_kernels.testing.compiled.survey import Row, survey
from fasttrain_kernels.testing.specs import COMPILED
from fasttrain_kernels.testing.targets import TARGETS

_EPILOGUE = """\
columns:
  regs     registers per lane (AMD: VGPRs)      spill    bytes per lane stored and loaded by spills; L: in a loop
  smem     shared memory per block, in KiB; +128t: columns of tensor memory
  occ      resident warps per SM of those that it can hold, and what limits them
  load, store, copy   global accesses by bits per lane; copy: global to shared memory, asynchronous
  mma      tensor core instructions             sfu      exp, log, rsqrt     bar  block barriers     instr  all

The exit status is 1 if a kernel breaks a rule (it spills, does not fit, has narrow accesses though it streams, or
has a bf16 or fp16 matmul without tensor cores), or is worse than its figures in --stored.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 190)
    start = time.perf_counter()
    rows = list(_survey_all(options.target, options.op, options.jobs))
    for target in options.target:
        console.print(_table(target, [row for row in rows if row.target == target]))
    stored = {} if options.update else _comparable(options.stored)
    found = {(r.target, r.op, r.key): p for r in rows if (p := rules.problems(r) or rules.regressed(r, stored))}
    for (target, op, key), problem in sorted(found.items()):
        console.print(f"{target} {op} {key}: {'; '.join(problem)}", style="red", highlight=False, markup=False)
    binaries = len({row.binary for row in rows})
    console.print(
        f"{binaries} binaries of {len(rows)} launches on {len(options.target)} targets, {len(found)} problems, "
        f"triton {triton.__version__}, {time.perf_counter() - start:.0f} s",
        highlight=False,
    )
    if options.json:
        rules.write(options.json, rules.figures(rows))
    if options.update:
        _update(options.stored, rows, whole=set(options.op) == set(COMPILED))
    return 1 if found else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fasttrain_kernels.testing.compiled",
        description=__doc__,
        epilog=_EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="T", help=", ".join(TARGETS)
    )
    parser.add_argument(
        "--op", nargs="+", choices=COMPILED, default=list(COMPILED), metavar="OP", help=", ".join(COMPILED)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    parser.add_argument("--stored", type=Path, metavar="FILE", help="figures to compare with")
    parser.add_argument("--update", action="store_true", help="store the figures in that file instead")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: all cores)"
    )
    options = parser.parse_args(arguments)
    if options.update and options.stored is None:
        parser.error("--update needs --stored FILE")
    return options


def _survey_all(targets: Sequence[str], ops: Sequence[str], jobs: int) -> Iterator[Row]:
    if jobs == 1:
        for target in targets:
            for op in ops:
                yield from survey(target, op)
        return
    columns = (TextColumn("compiling {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # spawn: a forked child of a process with torch's threads may hang
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(min(jobs, len(targets) * len(ops)), mp_context=context) as pool,
    ):
        bar = progress.add_task("", total=len(targets) * len(ops))
        slowest_first = sorted(ops, key=list(COMPILED).index, reverse=True)
        tasks = {pool.submit(survey, target, op): f"{op} {target}" for op in slowest_first for target in targets}
        for task in as_completed(tasks):
            progress.update(bar, advance=1, description=tasks[task])
            yield from task.result()


def _comparable(path: Path | None) -> rules.Figures:
    """The stored figures, if they are of this Triton: another one compiles differently."""
    version, stored = rules.read(path) if path else ("", {})
    return stored if version == triton.__version__ else {}


def _update(path: Path, rows: Sequence[Row], *, whole: bool) -> None:
    """Replace the surveyed part of the stored figures. After a survey of all ops, nothing else of its targets stays."""
    stored = rules.read(path)[1] if path.exists() else {}
    for target, ops in rules.figures(rows).items():
        stored[target] = ops if whole else stored.get(target, {}) | ops
    rules.write(path, stored)


def _table(target: str, rows: Sequence[Row]) -> Table:
    limits = TARGETS[target]
    table = Table(
        title=f"{target} ({limits.gpus})", title_justify="left", header_style="bold", box=None, pad_edge=False
    )
    for name in ("kernel", "case"):
        table.add_column(name, overflow="fold")
    for name in ("warps", "regs", "spill", "smem", "occ"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("limit", "load", "store", "copy", "mma"):
        table.add_column(name, no_wrap=True)
    for name in ("sfu", "bar", "instr"):
        table.add_column(name, justify="right", no_wrap=True)
    shown: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (list(COMPILED).index(row.op), row.kernel)):
        shown.setdefault(row.binary or f"{row.case} failed", []).append(row)
    for same in shown.values():
        table.add_row(*_cells(same), style="red" if rules.problems(same[0]) else None)
    return table


def _cells(same: Sequence[Row]) -> list[str]:
    row, *others = same
    kernel = row.metadata
    if kernel is None:
        return [row.op, row.case, row.error.splitlines()[0][:60]]
    occupancy = kernel.occupancy
    spill = f"{kernel.spill_stores}/{kernel.spill_loads}{'L' if kernel.loop_spills else ''}" if kernel.spills else "0"
    return [
        row.kernel.removeprefix("_").removesuffix("_kernel"),
        row.case + (f" +{len(others)}" if others else ""),
        str(kernel.num_warps),
        str(kernel.registers),
        spill,
        f"{kernel.shared / 1024:.3g}" + (f"+{kernel.tensor_memory}t" if kernel.tensor_memory else ""),
        f"{occupancy.warps}/{occupancy.max_warps}",
        occupancy.limiter,
        _widths(kernel.loads),
        _widths(kernel.stores),
        " ".join(filter(None, (_widths(kernel.copies), f"tma:{kernel.tma}" if kernel.tma else ""))),
        " ".join(f"{name}:{count}" for name, count in sorted(kernel.matrix.items())),
        str(kernel.special),
        str(kernel.barriers),
        str(kernel.instructions),
    ]


def _widths(accesses: dict[int, int]) -> str:
    return " ".join(f"{bits}:{count}" for bits, count in sorted(accesses.items(), reverse=True))


if __name__ == "__main__":
    sys.exit(main())
