"""fasttrain data lint: what is wrong with a dataset, before a model learns it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fasttrain.cli.errors import user_errors
from fasttrain.cli.options import at_least, console
from fasttrain.units import plural

if TYPE_CHECKING:
    from fasttrain.data import AnyDataset
    from fasttrain.data.lint import LintFinding, LintReport

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
PLOTS = (".png", ".svg")
MILLION = 1_000_000
EXCERPT = 300  # characters of an example


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: clean; 1: errors, or warnings with --strict; 2: a mistake in the command."""
    options = _parser().parse_args(arguments)
    with user_errors("fasttrain data lint"):
        from fasttrain.data.lint import lint

        if options.plot is not None:
            from fasttrain.data.lint.plot import draw  # before the work, so that a missing matplotlib shows at once
        dataset = _opened(options)
        names = options.split or dataset.splits
        total = sum(len(dataset.split(name)) for name in names)
        screen = Console(stderr=True)
        with Progress(
            TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("million tokens"),
            TimeRemainingColumn(), console=screen, transient=True, disable=options.quick or not screen.is_terminal,
        ) as bar:  # fmt: skip
            task = bar.add_task("", total=round(total / MILLION))
            report = lint(
                dataset,
                splits=names,
                quick=options.quick,
                sequence=options.sequence,
                max_examples=options.max_examples,
                on_progress=lambda tokens: bar.advance(task, tokens / MILLION),
            )
        if options.json is not None:
            options.json.write_text(report.to_json(), "utf-8")
        if options.plot is not None:
            draw(report, options.plot)
    _print(report, console())
    return report.exit_code(strict=options.strict)


def _opened(options: argparse.Namespace) -> AnyDataset:
    from fasttrain.data import Described, ExternalDataset, open_dataset

    described = Described(options.tokenizer, options.vocab, options.separator)
    dataset = open_dataset(options.path, described)
    if described and not isinstance(dataset, ExternalDataset):
        raise ValueError(
            f"--tokenizer, --vocab and --separator are for data that does not say: {dataset.path} is a prepared "
            "dataset and does; remove them"
        )
    return dataset


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fasttrain data lint", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="DIR", help="as data.path of a run; none: the default one"
    )
    parser.add_argument("--quick", action="store_true", help="look at samples only: about a second at any size")
    for name, kind in (("tokenizer", Path), ("vocab", int), ("separator", int)):
        parser.add_argument(f"--{name}", type=kind, help=f"as data.{name} of a run, for data that does not say")
    parser.add_argument("--split", action="append", metavar="NAME", help="only this split (repeatable)")
    parser.add_argument(
        "--sequence", type=at_least(0), metavar="N", help="tokens of a sample, to compare documents with"
    )
    parser.add_argument("--strict", action="store_true", help="fail on warnings too")
    parser.add_argument("--max-examples", type=at_least(0), default=3, metavar="N", help="of each finding (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings")
    parser.add_argument("--plot", type=_plot_file, metavar="FILE", help="draw a picture: .png or .svg")
    return parser


def _plot_file(text: str) -> Path:
    if Path(text).suffix not in PLOTS:
        raise argparse.ArgumentTypeError(f"{text} must end with {' or '.join(PLOTS)}")
    return Path(text)


def _print(report: LintReport, screen: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD if screen.is_terminal else None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("split", no_wrap=True)
    table.add_column("what was found", overflow="fold", ratio=1)
    split = report.findings[0].split
    for finding in report.findings:
        if finding.split != split:
            table.add_section()
        split, style = finding.split, STYLES[finding.severity]
        table.add_row(f"[{style}]{finding.severity}[/]", finding.check, finding.split, escape(finding.text))
    screen.print(table)
    for finding in (*report.having("error"), *report.having("warning")):
        _print_examples(finding, screen)
    errors, warnings = len(report.having("error")), len(report.having("warning"))
    what = "samples of " if report.quick else ""
    screen.print(
        f"{plural(errors, 'error')}, {plural(warnings, 'warning')} in {what}{report.dataset}: "
        f"{sum(report.read.values()) / 1e6:,.1f}M tokens in {report.seconds:.1f} s",
        soft_wrap=True,
    )


def _print_examples(finding: LintFinding, screen: Console) -> None:
    if not finding.examples:
        return
    screen.print(f"{finding.check} in {finding.split}, for example:", style=STYLES[finding.severity])
    for example in finding.examples:
        document = "" if example.document is None else f"document {example.document:,}, "
        origin = "" if example.source is None else f", {example.source}"
        screen.print(f"  {document}token {example.offset:,}{origin}", markup=False, soft_wrap=True)
        screen.print(Padding(Text(repr(example.text)[:EXCERPT], overflow="fold"), (0, 0, 0, 4)))
