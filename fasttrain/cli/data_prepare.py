"""fasttrain data prepare INPUT... --out DIR: text, source trees, JSONL and Parquet become a dataset."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from fasttrain.cli.errors import user_errors
from fasttrain.units import clock

if TYPE_CHECKING:
    from fasttrain.data.prepare import PreparationProgress, Prepared

PROGRAM = "fasttrain data prepare"
TRAINED = 8192  # tokens, where no tokenizer is asked for
SECONDS = 10  # between lines, where there is no terminal
INTERRUPTED = 130  # exit code, as shells have it


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """The inputs."""

    text_key: str = "text"
    """The key of JSONL, or the column of Parquet, that holds the text."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """auto: .jsonl, .ndjson and .parquet by their names, also before .gz and .zst; anything else is text."""
    include: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATTERN")] = ()
    """In directories, only files like this: '*.md', or 'src/*'. May be repeated."""
    exclude: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATTERN")] = ()
    """In directories, no files and directories like this. May be repeated."""


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """How text becomes tokens."""

    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="PATH|bytes")] = None
    """A tokenizer.json, the directory of a model or dataset that has one, or 'bytes'."""
    train_tokenizer: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Train a byte-level BPE with so many tokens on the text. This is what happens if neither is given, with 8192."""
    separator: Annotated[str | None, tyro.conf.arg(metavar="TOKEN")] = None
    """The token before each document. By default <|endoftext|>, or what the tokenizer's files say."""


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """Which documents are kept, and for what."""

    validation: float = 0.005
    """Share of the documents that is held out. The content of a document decides: adding others changes nothing."""
    shortest: int = 16
    """Documents with fewer characters are dropped."""
    longest: int = 4 * 2**20
    """Documents with more bytes are cut at ends of lines."""
    keep_duplicates: bool = False
    """Keep documents that are equal to an earlier one."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")]
    """Files, directories, and patterns in quotes."""
    out: Path
    """The directory of the dataset, which must not exist."""
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Processes. By default one for each core."""
    restart: bool = False
    """Begin anew, where an interrupted preparation would resume."""
    reading: InputOptions = field(default_factory=InputOptions)
    tokens: TokenOptions = field(default_factory=TokenOptions)
    documents: DocumentOptions = field(default_factory=DocumentOptions)


def main(arguments: Sequence[str]) -> int:
    options = tyro.cli(
        PrepareOptions,
        args=list(arguments),
        prog=PROGRAM,
        description=(
            "Make a dataset of text files, source trees, JSONL (plain, .gz, .zst) and Parquet. Interrupted, the same "
            "command resumes where it stopped."
        ),
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )
    console = Console(stderr=True, highlight=False)
    with user_errors(PROGRAM):
        try:
            with _shown(console) as on_progress:
                prepared = _prepare(options, on_progress)
        except KeyboardInterrupt:
            console.print("interrupted; the same command resumes where it stopped")
            return INTERRUPTED
        _summarize(prepared, Console(highlight=False))
    return 0


def _prepare(options: PrepareOptions, on_progress: Callable[[PreparationProgress], None]) -> Prepared:
    reading, tokens, choosing = options.reading, options.tokens, options.documents
    if tokens.tokenizer and tokens.train_tokenizer:
        raise ValueError("--tokenizer and --train-tokenizer are two ways to one thing; choose one")
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers ({options.workers}) must be 1 or more")
    from fasttrain.data.prepare import Settings, prepare

    return prepare(
        options.inputs,
        options.out,
        tokenizer=tokens.tokenizer or tokens.train_tokenizer or TRAINED,
        separator=tokens.separator,
        settings=Settings(
            text_key=reading.text_key,
            validation=choosing.validation,
            shortest=choosing.shortest,
            longest=choosing.longest,
            keep_duplicates=choosing.keep_duplicates,
        ),
        include=reading.include,
        exclude=reading.exclude,
        format=reading.format,
        workers=options.workers,
        restart=options.restart,
        on_progress=on_progress,
    )


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
    from fasttrain.data import Dataset

    dataset = Dataset(prepared.path)
    table = Table("", "documents", "tokens", "MB of text", "bytes per token", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, split in dataset.manifest.splits.items():
        sizes = (f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes / 1e6:,.1f}")
        table.add_row(name, *sizes, f"{split.bytes / split.tokens:.2f}")
    console.print(f"{prepared.path}: vocabulary of {dataset.vocab:,}, {dataset.manifest.dtype}", soft_wrap=True)
    console.print(table)
    if prepared.dropped:
        console.print(
            f"\ndropped documents, each with its file and line in {prepared.path}/dropped.jsonl:", soft_wrap=True
        )
        for reason, count in prepared.dropped.items():
            console.print(
                f"  {count:>9,} {reason:<13} first: {prepared.examples[reason]}", soft_wrap=True, markup=False
            )
    if prepared.spelled:
        console.print(f"\n{prepared.spelled:,} documents spell the separator; it is text there, and ends nothing")
    if "validation" not in dataset.manifest.splits:
        console.print(
            "\nno document was held out, and training has nothing to validate on: add documents, raise --validation, "
            "or split long ones with --longest",
            soft_wrap=True,
        )
    console.print(f"\nnext: fasttrain train --data.path {prepared.path}", soft_wrap=True)
