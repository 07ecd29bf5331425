"""fasttrain report: one page about one run or several, that opens from disk. docs/report.md explains it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fasttrain.cli.errors import user_errors
from fasttrain.units import disk_size

NAME = "report.html"


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: written; 2: a mistake in the command."""
    options = _parser().parse_args(arguments)
    with user_errors("fasttrain report"):
        from fasttrain.tools.report.page import write_page
        from fasttrain.tools.report.record import read_records

        if options.png is not None:  # before the work, so that a missing matplotlib shows at once
            from fasttrain.tools.report.picture import draw
        records = read_records(options.runs, verify=options.verify)
        out = options.out or (options.runs[0] / NAME if len(records) == 1 else Path(NAME))
        write_page(records, out)
        written = [out]
        if options.png is not None:
            written += draw(records, options.png)
    for path in written:
        print(f"{path}: {disk_size(path.stat().st_size)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fasttrain report", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the directory of a run, as runs/tiny")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: RUN/{NAME}; for several runs {NAME} in this directory"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the main curves too: a .png or .svg, or a directory for one each"
    )
    parser.add_argument("--verify", action="store_true", help="read all files of the checkpoints, compare checksums")
    return parser
