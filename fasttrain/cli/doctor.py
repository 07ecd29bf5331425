"""fasttrain doctor: what this machine has, what a run will use of it, and what is missing and how to get it.

Runs every op once against its reference, and measures matmuls and the disk.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fasttrain.cli.options import command, flag, option
from fasttrain.tools.doctor import MachineFinding

STYLES = {"ok": "default", "missing": "cyan", "warning": "yellow", "broken": "bold red"}


@command(
    "doctor",
    __doc__,
    option("--out", "where runs go", type=Path, default=Path("runs"), metavar="DIR"),
    flag("--quick", "look, and measure nothing"),
    flag("--json", "for scripts"),
    takes_settings=True,
)
def main(options: argparse.Namespace) -> int:
    """Exit code 0: nothing that a run needs is broken; 1: something is; 2: a mistake in the command."""
    from fasttrain.tools.doctor.examine import examine

    findings: list[MachineFinding] = []
    console = Console(highlight=False, soft_wrap=True, quiet=options.json)
    for finding in examine(options.settings, options.out, quick=options.quick):
        if not findings or finding.section != findings[-1].section:
            console.print(f"\n[bold]{finding.section}[/]" if findings else f"[bold]{finding.section}[/]")
        mark = "" if finding.level == "ok" else f"  <- {finding.level}"
        console.print(f"  {finding.name:<24} [{STYLES[finding.level]}]{escape(finding.value)}{mark}[/]")
        findings.append(finding)
    broken = [finding.name for finding in findings if finding.level == "broken"]
    if options.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings], "broken": broken}, indent=1))
    for level, title in (("broken", "broken"), ("warning", "suspicious"), ("missing", "missing, and worth having")):
        concerned = [finding for finding in findings if finding.level == level]
        if concerned:
            console.print(f"\n[bold]{title}[/]")
        for finding in concerned:
            console.print(f"  [{STYLES[level]}]{escape(finding.name)}: {escape(finding.value)}[/]")
            console.print(f"    {escape(finding.remedy)}")
    fine = "[bold green]fine[/]: nothing that a run needs is missing"
    console.print(f"\n[bold red]{len(broken)} broken[/]" if broken else f"\n{fine}")
    return 1 if broken else 0
