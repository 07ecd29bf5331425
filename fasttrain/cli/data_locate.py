"""fasttrain data locate RUN --step N: which documents a step trained on; --document D: which steps saw a document."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fasttrain.cli.errors import user_errors

if TYPE_CHECKING:
    from fasttrain.data.locate import Excerpt, Occurrence


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: found; 1: the document was not seen; 2: a mistake in the command."""
    options = _parser().parse_args(arguments)
    with user_errors("fasttrain data locate"):
        if options.document is not None:
            return _steps(options)
        return _documents(options)


def _documents(options: argparse.Namespace) -> int:
    from fasttrain.data.locate import locate, step_of_token
    from fasttrain.metrics import read_metrics

    metrics = read_metrics(options.run)
    if options.token is not None:
        # A run that resumes from another's checkpoint has no lines for the steps before.
        first = round(metrics[0]["step"]) if metrics else 1
        step = step_of_token([round(line["tokens"]) for line in metrics], options.token) + first
        steps = range(step, step + 1)
    else:
        steps = options.step
    if metrics and steps[-1] > metrics[-1]["step"]:
        print(f"note: the run has trained {metrics[-1]['step']} steps; later ones are as they will be", file=sys.stderr)
    excerpts = (excerpt for step in steps for excerpt in locate(options.run, step - 1))
    if options.rank is not None:
        excerpts = (excerpt for excerpt in excerpts if excerpt.dp_rank == options.rank)
    _print(options, excerpts, _document_table())
    return 0


def _steps(options: argparse.Namespace) -> int:
    from fasttrain.data.locate import documents_from, occurrences
    from fasttrain.data.segments import read_segments
    from fasttrain.metrics import read_metrics

    done = max((round(line["step"]) for line in read_metrics(options.run)), default=0)
    documents = [options.document]
    if not options.document.isdigit():
        dataset = read_segments(options.run)[-1].open().datasets
        if options.component not in dataset:
            raise ValueError(f"there is no component {options.component!r}; --component takes {', '.join(dataset)}")
        documents = documents_from(dataset[options.component], options.document)
    places = [
        (int(document), place)
        for document in documents
        for place in occurrences(options.run, int(document), component=options.component, stop=done)
    ]
    table = _table("step", "rank", "row", "document", "sample", "tokens of the stream")
    _print(options, iter(places), table)
    if not places:
        print(f"not seen in the {done} steps of {options.run} so far", file=sys.stderr)
    return 0 if places else 1


def _print(options: argparse.Namespace, found: Iterator[Any], table: Table) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    if options.json:
        for item in found:
            print(json.dumps(_line(item, options), default=str))
        return
    if options.text:
        for item in found:
            console.rule(escape(_title(item)), align="left")
            console.print(_text(item, options), markup=False, highlight=False)
        return
    for item in found:
        table.add_row(*_cells(item))
    console.print(table)


def _cells(item: Excerpt | tuple[int, Occurrence]) -> list[str]:
    if isinstance(item, tuple):
        document, place = item
        span = f"{place.start:,} - {place.stop:,}"
        return [str(place.step + 1), str(place.dp_rank), str(place.row), str(document), str(place.sample), span]
    cells = [str(item.step + 1), str(item.dp_rank), str(item.row), item.component, f"{item.start:,} - {item.stop:,}"]
    text = "" if item.bytes is None else f"{item.bytes[0]:,} - {item.bytes[1]:,}"
    return [*cells, "" if item.document is None else str(item.document), text, escape(str(item.source or ""))]


def _title(item: Excerpt | tuple[int, Occurrence]) -> str:
    document, place = item if isinstance(item, tuple) else (item.document, item)
    where = f"step {place.step + 1}, rank {place.dp_rank}, row {place.row}"
    source = f": {item.source}" if not isinstance(item, tuple) and item.source else ""
    return f"{where}, document {'?' if document is None else document}{source}"


def _text(item: Excerpt | tuple[int, Occurrence], options: argparse.Namespace) -> str:
    from fasttrain.data.locate import text_of
    from fasttrain.data.segments import segment_at

    place = item[1] if isinstance(item, tuple) else item
    component = options.component if isinstance(item, tuple) else item.component
    return text_of(segment_at(options.run, place.step).open().datasets[component], place.start, place.stop)


def _line(item: Excerpt | tuple[int, Occurrence], options: argparse.Namespace) -> dict[str, Any]:
    if isinstance(item, tuple):
        document, place = item
        line = asdict(replace(place, step=place.step + 1)) | dict(document=document)
    else:
        line = asdict(replace(item, step=item.step + 1))
    return line | (dict(text=_text(item, options)) if options.text else {})


def _document_table() -> Table:
    return _table("step", "rank", "row", "component", "tokens of the stream", "document", "bytes of it", "source")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in ("component", "source") else "right", no_wrap=True)
    return table


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor a range of steps such as 10-20") from None
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: steps count from 1, as in metrics.jsonl")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fasttrain data locate",
        description="Which documents, files and bytes a step of a run trained on, rank by rank; or which steps saw a "
        "document. Computed from what the run has recorded, for any step, whenever it was trained.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of the run (--out of training)")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", type=_range, metavar="N|N-M", help="a step, or a range; from 1, as metrics count")
    asked.add_argument("--token", type=int, metavar="P", help="the step that trained on the run's token number P")
    asked.add_argument(
        "--document",
        metavar="D|FILE[:LINE]",
        help="the steps that saw document D, or what came from a file (the end of its path will do)",
    )
    parser.add_argument("--component", default="", metavar="NAME", help="of a mixture: where the document is")
    parser.add_argument("--rank", type=int, metavar="R", help="only what this rank had")
    parser.add_argument("--text", action="store_true", help="show the decoded text")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each result")
    return parser
