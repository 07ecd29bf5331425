"""fasttrain eval RUN: loss, perplexity and bits per byte on any data, and benchmark tasks. docs/eval.md explains it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from fasttrain.bounds import Bounds
from fasttrain.cli.options import MODEL, RUN, command, console, flag, group, number, option, table, trained_model

if TYPE_CHECKING:
    from fasttrain.distributed.runtime import Runtime
    from fasttrain.tools.trained_model import TrainedModel

TABLES = (  # the columns of sets and of tasks, and how their figures are written
    {"set": "", "loss": ".4f", "perplexity": ",.4g", "bits_per_byte": ".4f", "accuracy": ".2%", "tokens": ","},
    {"task": "", "metric": "", "value": ".4f", "stderr": ".4f", "samples": "", "fewshot": ""},
)


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"{text!r} must be NAME=PATH, as wiki=data/wiki")
    return name, Path(path)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


@command(
    "eval",
    __doc__,
    RUN,
    group(
        "sets: the run's held-out documents and validation.sets, and",
        option("--set", "one more dataset; repeatable", action="append", default=[], type=_named, metavar="NAME=PATH"),
        number("--sequences", "of each set, at most; default: the whole set", Bounds(1, 10**9)),
    ),
    group(
        "tasks of lm-evaluation-harness (pip install 'fasttrain[eval]'), without the sets",
        option("--tasks", "names of tasks or groups", type=_names, default=[], metavar="A,B"),
        number("--fewshot", "examples before each question; default: the task's", Bounds(0, 1000)),
        number("--limit", "questions of each task, to try it; default: all", Bounds(1, 10**9)),
        option("--include-path", "a directory with tasks of your own", type=Path, metavar="DIR"),
    ),
    flag("--json", "a line of JSON for each result"),
    number("--batch", "sequences at a time; default: batch.micro of the run", Bounds(1, 10**6)),
    *MODEL,
)
def main(options: argparse.Namespace) -> int:
    """Exit code 0: scored; 1: a loss is worse than guessing; 2: a mistake in the command."""
    for name in ("fewshot", "limit", "include_path"):
        if getattr(options, name) is not None and not options.tasks:
            shown = name.replace("_", "-")
            raise ValueError(f"--{shown} is for tasks, and there are none; add --tasks, or leave it out")
    from fasttrain.rundir import RunDir
    from fasttrain.tools.evaluate import record, task_lines
    from fasttrain.tools.report.page import write_report

    if options.tasks:
        from fasttrain.tools.harness import Harness, run_tasks  # before the work: a missing package shows at once
    with trained_model(options) as (loaded, runtime):
        lines: list[dict[str, Any]] = []
        if options.tasks:
            harness = Harness(loaded, batch=options.batch or loaded.settings.batch.micro)
            limits = dict(fewshot=options.fewshot, limit=options.limit, include=options.include_path)
            lines += task_lines(loaded.checkpoint.step, run_tasks(harness, options.tasks, **limits))
        if not options.tasks or options.set or options.sequences:
            lines += _set_lines(options, loaded, runtime)
        if runtime.is_main:
            _show(options, loaded, lines)
            if loaded.run is not None:
                record(loaded.run, lines)
                if (page := RunDir(loaded.run).report).exists():
                    write_report([loaded.run], page)
    return 1 if any(line.get("suspicion") for line in lines) else 0


def _set_lines(options: argparse.Namespace, loaded: TrainedModel, runtime: Runtime) -> list[dict[str, Any]]:
    from fasttrain.tools.evaluate import WHOLE, score_sets, set_line

    if changed := loaded.changed_data():
        print(f"note: {changed}", file=sys.stderr)
    lines = []
    with Console(stderr=True).status("the first set") as status:
        for name, score in score_sets(
            loaded, runtime, more=dict(options.set), sequences=options.sequences or WHOLE, batch=options.batch
        ):
            lines.append(set_line(loaded.checkpoint.step, name, score, loaded.data.first.vocab))
            status.update(f"after {escape(name)}: loss {score.loss:.4f}")
    return lines


def _show(options: argparse.Namespace, loaded: TrainedModel, lines: list[dict[str, Any]]) -> None:
    if options.json:
        for line in lines:
            print(json.dumps(line))
        return
    screen, checkpoint = console(), loaded.checkpoint
    screen.print(f"step {checkpoint.step} of {loaded.run or checkpoint.path}", soft_wrap=True)
    for formats in TABLES:
        rows = table(screen, *(name.replace("_", " ") for name in formats))
        for line in lines:
            if line.keys() >= formats.keys():
                by = "" if line.get("filter", "none") == "none" else f" ({line['filter']})"
                cells = line | {"metric": f"{line.get('metric')}{by}"}
                figures = ("" if cells[name] is None else f"{cells[name]:{form}}" for name, form in formats.items())
                rows.add_row(*map(escape, figures))
        if rows.rows:
            screen.print(rows)
    for line in lines:
        if line.get("suspicion"):
            screen.print(f"[bold red]{escape(line['set'])}: {escape(line['suspicion'])}[/]", soft_wrap=True)
