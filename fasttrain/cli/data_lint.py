"""fasttrain data lint: what is wrong with a dataset, before a model learns it."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fasttrain.bounds import Bounds
from fasttrain.cli.options import command, console, flag, number, numbers, option, table
from fasttrain.config import DataConfig
from fasttrain.fs import write_file
from fasttrain.units import plural

if TYPE_CHECKING:
    from fasttrain.data.lint import LintReport

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
PLOTS = (".png", ".svg")
MILLION = 1_000_000
EXCERPT = 300  # characters of an example
OF_A_RUN = "of a run, for data that does not say"


def _plot_file(text: str) -> Path:
    if Path(text).suffix not in PLOTS:
        raise ValueError(f"{text} must end with {' or '.join(PLOTS)}")
    return Path(text)


@command(
    "data lint",
    __doc__,
    option("path", "as data.path of a run; none: the default one", nargs="?", type=Path, metavar="DIR"),
    flag("--quick", "look at samples only: about a second at any size"),
    option("--tokenizer", f"as data.tokenizer {OF_A_RUN}", type=Path),
    *numbers(DataConfig, {name: f"as data.{name} {OF_A_RUN}" for name in ("vocab", "separator")}),
    option("--split", "only this split (repeatable)", action="append", metavar="NAME"),
    flag("--strict", "fail on warnings too"),
    number("--max-examples", "of each finding", Bounds(0, 1000), default=3),
    option("--json", "write all findings", type=Path, metavar="FILE"),
    option("--plot", "draw a picture: .png or .svg", type=_plot_file, metavar="FILE"),
)
def main(options: argparse.Namespace) -> int:
    """Exit code 0: clean; 1: errors, or warnings with --strict; 2: a mistake in the command."""
    from fasttrain.data.datasets import open_dataset
    from fasttrain.data.formats.dataset import Described, ExternalDataset
    from fasttrain.data.lint import lint

    if options.plot is not None:
        from fasttrain.data.lint.plot import draw  # before the work, so that a missing matplotlib shows at once
    described = Described(options.tokenizer, options.vocab, options.separator)
    dataset = open_dataset(options.path, described)
    if described and not isinstance(dataset, ExternalDataset):
        raise ValueError(
            f"--tokenizer, --vocab and --separator are for data that does not say: {dataset.path} is a prepared "
            "dataset and does; remove them"
        )
    names = options.split or dataset.splits
    screen = Console(stderr=True)
    with Progress(
        TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("million tokens"),
        TimeRemainingColumn(), console=screen, transient=True, disable=options.quick or not screen.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=round(sum(len(dataset.split(name)) for name in names) / MILLION))
        report = lint(
            dataset,
            splits=names,
            quick=options.quick,
            max_examples=options.max_examples,
            on_progress=lambda tokens: bar.advance(task, tokens / MILLION),
        )
    if options.json is not None:
        write_file(options.json, [report.to_json()])
    if options.plot is not None:
        draw(report, options.plot)
    _print(report, console())
    return report.exit_code(strict=options.strict)


def _print(report: LintReport, screen: Console) -> None:
    rows = table(screen, "", "check", "split", "what was found")
    for column in rows.columns[:3]:
        column.no_wrap = True
    for split, findings in groupby(report.findings, key=lambda finding: finding.split):
        rows.add_section()
        for finding in findings:
            severity = f"[{STYLES[finding.severity]}]{finding.severity}[/]"
            rows.add_row(severity, finding.check, split, escape(finding.text))
    screen.print(rows)
    errors, warnings = report.having("error"), report.having("warning")
    for finding in (*errors, *warnings):
        if finding.examples:
            screen.print(f"{finding.check} in {finding.split}, for example:", style=STYLES[finding.severity])
        for example in finding.examples:
            document = "" if example.document is None else f"document {example.document:,}, "
            origin = "" if example.source is None else f", {example.source}"
            screen.print(f"  {document}token {example.offset:,}{origin}", markup=False, soft_wrap=True)
            screen.print(Padding(Text(repr(example.text)[:EXCERPT], overflow="fold"), (0, 0, 0, 4)))
    what = "samples of " if report.quick else ""
    screen.print(
        f"{plural(len(errors), 'error')}, {plural(len(warnings), 'warning')} in {what}{report.dataset}: "
        f"{sum(report.read.values()) / 1e6:,.1f}M tokens in {report.seconds:.1f} s",
        soft_wrap=True,
    )
