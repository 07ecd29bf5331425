"""The stored figures as a page with plots, or as the table of the README.

python -m bench.report --out bench.html
python -m bench.report --markdown
python -m bench.report --write README.md        of the hardware measured last, between the two marks of a file
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.report.content import places, targets
from bench.report.markdown import markdown, write
from bench.report.page import page
from bench.tracking import HISTORY, history


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the page here; bench.html if nothing is asked for"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put the table of the last hardware between the marks of this file"
    )
    parser.add_argument("--results", type=Path, default=HISTORY, metavar="FOLDER", help="stored runs")
    asked = parser.parse_args(argv)
    if not asked.results.is_dir():
        parser.error(f"there is no folder {asked.results}; make bench-save fills {HISTORY}")
    try:
        found = places(history(asked.results))
        if asked.markdown:
            print(markdown(found))
        if asked.write:
            changed = write(asked.write, markdown(found[:1]))  # the newest
            print(f"{asked.write}: {'changed' if changed else 'was up to date'}", file=sys.stderr)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if asked.out or not (asked.markdown or asked.write):
        out = asked.out or Path("bench.html")
        out.write_text(page(found, targets()), "utf-8")
        print(f"wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
