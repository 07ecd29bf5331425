"""fasttrain doctor: what this machine has, what a run will use of it, and what is missing and how to get it.

Runs every op once against its reference, and measures matmuls, memory and the disk.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fasttrain.cli.errors import user_errors
from fasttrain.cli.parse import load
from fasttrain.recipes import RECIPES
from fasttrain.tools.doctor import MachineFinding

PROGRAM = "fasttrain doctor"
STYLES = {"ok": "default", "missing": "cyan", "warning": "yellow", "broken": "bold red"}


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: nothing that a run needs is broken; 1: something is; 2: a mistake in the command."""
    options, rest = _parser().parse_known_args(arguments)
    settings = load(rest, RECIPES, PROGRAM)
    from fasttrain.tools.doctor.examine import examine

    with user_errors(PROGRAM):
        findings = []
        console = Console(highlight=False, soft_wrap=True)
        section = ""
        for finding in examine(settings, options.out, quick=options.quick):
            findings.append(finding)
            if not options.json:
                if finding.section != section:
                    section = finding.section
                    console.print(f"\n[bold]{section}[/]" if len(findings) > 1 else f"[bold]{section}[/]")
                _show(finding, console)
    broken = [finding for finding in findings if finding.level == "broken"]
    if options.json:
        print(json.dumps({"findings": [asdict(f) for f in findings], "broken": [f.name for f in broken]}, indent=1))
    else:
        _conclude(findings, console)
    return 1 if broken else 0


def _show(finding: MachineFinding, console: Console) -> None:
    mark = "" if finding.level == "ok" else f"  <- {finding.level}"
    console.print(f"  {finding.name:<24} [{STYLES[finding.level]}]{escape(finding.value)}{mark}[/]")


def _conclude(findings: list[MachineFinding], console: Console) -> None:
    """The remedies, the gravest first."""
    for level, title in (("broken", "broken"), ("warning", "suspicious"), ("missing", "missing, and worth having")):
        concerned = [finding for finding in findings if finding.level == level]
        if concerned:
            console.print(f"\n[bold]{title}[/]")
        for finding in concerned:
            console.print(f"  [{STYLES[level]}]{escape(finding.name)}: {escape(finding.value)}[/]")
            console.print(f"    {escape(finding.remedy)}")
    broken = sum(finding.level == "broken" for finding in findings)
    outcome = f"[bold red]{broken} broken[/]" if broken else "[bold green]fine[/]: nothing that a run needs is missing"
    console.print(f"\n{outcome}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        epilog="Settings of fasttrain train (--recipe, --config, --parallel.compile on, ...) say which run is meant.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs go (default: runs)")
    parser.add_argument("--quick", action="store_true", help="look, and measure nothing")
    parser.add_argument("--json", action="store_true", help="for scripts")
    return parser
