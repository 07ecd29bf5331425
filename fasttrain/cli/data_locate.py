"""fasttrain data locate RUN --step N: which documents a step trained on; --document D: which steps saw a document.

Rank by rank, with files and bytes. Computed from what the run has recorded, for any step, whenever it was trained.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fasttrain.bounds import Bounds
from fasttrain.cli.options import RUN_DIRECTORY, command, flag, number, one_of, option
from fasttrain.units import plural

Line = dict[str, Any]  # an Excerpt, or an Occurrence of a document; its step counts from 1
DOCUMENT_COLUMNS = ("step", "rank", "row", "component", "tokens of the stream", "document", "source")
STEP_COLUMNS = ("step", "rank", "row", "document", "sample", "tokens of the stream")


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"{text!r} is neither a step nor a range of steps such as 10-20") from None
    if not found or found[0] < 1:
        raise ValueError(f"{text!r}: steps count from 1, as in metrics.jsonl")
    return found


@command(
    "data locate",
    __doc__,
    RUN_DIRECTORY,
    one_of(
        option("--step", "a step, or a range; from 1, as metrics count", type=_range, metavar="N|N-M"),
        number("--token", "the step that trained on the run's token number P", Bounds(0, 10**18), metavar="P"),
        option(
            "--document", "the steps that saw it; of a file, the end of its path is enough", metavar="D|FILE[:LINE]"
        ),
    ),
    option("--component", "of a mixture: where the document is", default="", metavar="NAME"),
    number("--rank", "only what this rank had", Bounds(0, 10**6), metavar="R"),
    flag("--text", "show the decoded text"),
    flag("--json", "a line of JSON for each result"),
)
def main(options: argparse.Namespace) -> int:
    """Exit code 0: found; 1: the document was not seen; 2: a mistake in the command."""
    if options.document is None:
        _print(options, _documents(options), DOCUMENT_COLUMNS)
        return 0
    from fasttrain.metrics.jsonl import read_metrics

    done = max((round(line["step"]) for line in read_metrics(options.run)), default=0)
    places = list(_steps(options, done))
    _print(options, places, STEP_COLUMNS)
    if not places:
        print(f"not seen in the {done} steps of {options.run} so far", file=sys.stderr)
    return 0 if places else 1


def _documents(options: argparse.Namespace) -> Iterator[Line]:
    from fasttrain.data.locate import locate, step_of_token
    from fasttrain.data.segments import segment_at
    from fasttrain.metrics.jsonl import read_metrics

    metrics, steps = read_metrics(options.run), options.step
    if options.token is not None:
        # A run that resumes from another's checkpoint has no lines for the steps before.
        first = round(metrics[0]["step"]) if metrics else 1
        step = step_of_token([round(line["tokens"]) for line in metrics], options.token) + first
        steps = range(step, step + 1)
    if metrics and steps[-1] > metrics[-1]["step"]:
        print(f"note: the run has trained {metrics[-1]['step']} steps; later ones are as they will be", file=sys.stderr)
    if options.rank is not None and options.rank >= (ranks := segment_at(options.run, steps[0] - 1).dp_size):
        raise ValueError(f"--rank {options.rank}: {options.run} has {plural(ranks, 'rank')}; they count from 0")
    for step in steps:
        for excerpt in locate(options.run, step - 1):
            if options.rank in (None, excerpt.dp_rank):
                yield vars(excerpt) | dict(step=step)


def _steps(options: argparse.Namespace, done: int) -> Iterator[Line]:
    from fasttrain.data.locate import documents_from, occurrences
    from fasttrain.data.segments import read_segments

    documents = [options.document]
    if not options.document.isdigit():
        dataset = read_segments(options.run)[-1].open().datasets
        if options.component not in dataset:
            raise ValueError(f"there is no component {options.component!r}; --component takes {', '.join(dataset)}")
        documents = documents_from(dataset[options.component], options.document)
    for document in map(int, documents):
        for place in occurrences(options.run, document, component=options.component, stop=done):
            yield vars(place) | dict(step=place.step + 1, document=document)


def _print(options: argparse.Namespace, lines: Iterable[Line], columns: tuple[str, ...]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in ("component", "source") else "right", no_wrap=True)
    for line in lines:
        text = dict(text=_text(line, options)) if options.text else {}
        if options.json:
            print(json.dumps(line | text, default=lambda value: vars(value) if is_dataclass(value) else str(value)))
        elif options.text:
            console.rule(escape(_title(line)), align="left")
            console.print(text["text"], markup=False, highlight=False)
        else:
            table.add_row(*map(_cells(line).__getitem__, columns))
    if not options.json and not options.text:
        console.print(table)


def _cells(line: Line) -> dict[str, str]:
    """What stands in each column."""
    cells = {name: "" if value is None else escape(str(value)) for name, value in line.items()}
    return cells | {"rank": cells["dp_rank"], "tokens of the stream": f"{line['start']:,} - {line['stop']:,}"}


def _title(line: Line) -> str:
    document = "?" if line["document"] is None else line["document"]
    source = f": {line['source']}" if line.get("source") else ""
    return f"step {line['step']}, rank {line['dp_rank']}, row {line['row']}, document {document}{source}"


def _text(line: Line, options: argparse.Namespace) -> str:
    from fasttrain.data.locate import text_of
    from fasttrain.data.segments import segment_at

    data = segment_at(options.run, line["step"] - 1).open()
    return text_of(data.datasets[line.get("component", options.component)], line["start"], line["stop"])
