"""fasttrain data prepare INPUT... --out DIR: text, source trees, JSONL and Parquet become a dataset."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from fasttrain.bounds import Bounds
from fasttrain.cli.options import command, flag, group, number, numbers, option, table
from fasttrain.config import PrepareConfig
from fasttrain.units import clock

if TYPE_CHECKING:
    from fasttrain.data.prepare import PreparationProgress, Prepared

TRAINED = 8192  # tokens, where no tokenizer is asked for
SECONDS = 10  # between lines, where there is no terminal
INTERRUPTED = 130  # exit code, as shells have it
KEPT = {  # the numbers of PrepareConfig
    "validation": "share to hold out, chosen by content",
    "shortest": "documents with fewer characters are dropped",
    "longest": "longer ones, in bytes, are cut at ends of lines",
}
PATTERNS: dict[str, Any] = dict(action="append", default=[], metavar="PATTERN")


@command(
    "data prepare",
    """Make a dataset of text files, source trees, JSONL (plain, .gz, .zst) and Parquet. Interrupted, the same command
resumes where it stopped.""",
    option("inputs", "files, directories, and patterns in quotes", nargs="*", type=Path, metavar="INPUT"),
    option("--out", "the directory of the dataset, which must not exist", type=Path, required=True, metavar="DIR"),
    number("--workers", "processes; default: one for each core", Bounds(1, 1000)),
    flag("--restart", "begin anew, where an interrupted preparation would resume"),
    group(
        "the inputs",
        option("--text-key", "the key of JSONL, or the column of Parquet, that holds the text", default="text"),
        option(
            "--format", "auto: .jsonl, .ndjson and .parquet by their names, also before .gz and .zst; others are text",
            choices=("auto", "text", "jsonl", "parquet"), default="auto",
        ),
        option("--include", "in directories, only files like this: '*.md', or 'src/*' (repeatable)", **PATTERNS),
        option("--exclude", "in directories, no files and directories like this (repeatable)", **PATTERNS),
    ),
    group(
        "how text becomes tokens",
        option("--tokenizer", "a tokenizer.json, a model or dataset that has one, or 'bytes'", metavar="PATH|bytes"),
        number("--train-tokenizer", f"tokens of a byte-level BPE to train; default: {TRAINED}", Bounds(257, 10**6)),
        option("--separator", "before each document; default: the tokenizer's, or <|endoftext|>", metavar="TOKEN"),
    ),
    group(
        "which documents are kept, and for what",
        *numbers(PrepareConfig, KEPT),
        flag("--keep-duplicates", "keep documents that are equal to an earlier one"),
    ),
)  # fmt: skip
def main(options: argparse.Namespace) -> int:
    """Exit code 0: prepared; 2: a mistake in the command or the data; 130: interrupted."""
    if options.tokenizer and options.train_tokenizer:
        raise ValueError("--tokenizer and --train-tokenizer are two ways to one thing; choose one")
    console = Console(stderr=True, highlight=False)
    try:
        from fasttrain.data.prepare import prepare

        with _shown(console) as on_progress:
            prepared = prepare(
                options.inputs,
                options.out,
                tokenizer=options.tokenizer or options.train_tokenizer or TRAINED,
                separator=options.separator,
                settings=PrepareConfig(**{name: getattr(options, name) for name in vars(PrepareConfig())}),
                include=options.include,
                exclude=options.exclude,
                format=options.format,
                workers=options.workers,
                restart=options.restart,
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        console.print("interrupted; the same command resumes where it stopped")
        return INTERRUPTED
    _summarize(prepared, Console(highlight=False, soft_wrap=True))
    return 0


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[PreparationProgress], None]]:
    """A bar on a terminal; elsewhere, a line now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"))
    # refreshed by hand: workers are forked, and that should not happen beside a thread
    with Bar(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", rate="")
        stage, begin, first, told = "", 0.0, 0, 0.0

        def on_progress(progress: PreparationProgress) -> None:
            nonlocal stage, begin, first, told
            now = time.monotonic()
            is_new = progress.stage != stage
            if is_new:
                stage, begin, first = progress.stage, now, progress.done
            rate = _rate(progress, now - begin, progress.done - first)
            bar.update(task, description=stage, total=progress.total or None, completed=progress.done, rate=rate)
            bar.refresh()
            if not console.is_terminal and (is_new or now - told > SECONDS):
                console.print(f"{stage} {rate}".rstrip(), soft_wrap=True)
                told = now

        yield on_progress


def _rate(progress: PreparationProgress, seconds: float, done: int) -> str:
    if not progress.total:
        return ""
    text = f"{progress.done / 1e6:,.0f} of {progress.total / 1e6:,.0f} MB, {progress.documents:,} documents"
    if not done or not seconds:
        return text
    speed = done / seconds
    return f"{text}, {speed / 1e6:.1f} MB/s, {clock((progress.total - progress.done) / speed)} left"


def _summarize(prepared: Prepared, console: Console) -> None:
    from fasttrain.data.dataset import Dataset

    dataset = Dataset(prepared.path)
    splits = dataset.manifest.splits
    rows = table(console, "", "documents", "tokens", "MB of text", "bytes per token")
    for name, split in splits.items():
        sizes = (f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes / 1e6:,.1f}")
        rows.add_row(name, *sizes, f"{split.bytes / split.tokens:.2f}")
    console.print(f"{prepared.path}: vocabulary of {dataset.vocab:,}, {dataset.manifest.dtype}")
    console.print(rows, soft_wrap=False)
    if prepared.dropped:
        console.print(f"\ndropped documents, each with its file and line in {prepared.path}/dropped.jsonl:")
    for reason, count in prepared.dropped.items():
        console.print(f"  {count:>9,} {reason:<13} first: {prepared.examples[reason]}", markup=False)
    if "validation" not in splits:
        console.print(
            "\nno document was held out, and training has nothing to validate on: add documents, raise --validation, "
            "or split long ones with --longest"
        )
    console.print(f"\nnext: fasttrain train --data.path {prepared.path}")
