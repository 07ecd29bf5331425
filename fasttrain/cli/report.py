"""fasttrain report: one page about one run or several, that opens from disk. docs/report.md explains it."""

import argparse
from pathlib import Path

from fasttrain.cli.options import command, option
from fasttrain.units import disk_size

NAME = "report.html"


@command(
    "report",
    __doc__,
    option("runs", "the directory of a run, as runs/tiny", nargs="+", type=Path, metavar="RUN"),
    option("--out", f"default: RUN/{NAME}; for several runs {NAME} in this directory", type=Path, metavar="FILE"),
    option("--png", "draw the main curves too: a .png or .svg, or a directory for one each", type=Path, metavar="FILE"),
)
def main(options: argparse.Namespace) -> int:
    """Exit code 0: written; 2: a mistake in the command."""
    from fasttrain.tools.report.page import write_page
    from fasttrain.tools.report.record import read_records

    if options.png is not None:  # before the work, so that a missing matplotlib shows at once
        from fasttrain.tools.report.picture import draw
    records = read_records(options.runs)
    out = options.out or (options.runs[0] / NAME if len(records) == 1 else Path(NAME))
    write_page(records, out)
    for path in [out, *(draw(records, options.png) if options.png is not None else [])]:
        print(f"{path}: {disk_size(path.stat().st_size)}")
    return 0
