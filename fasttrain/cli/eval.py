"""fasttrain eval RUN: loss, perplexity and bits per byte on any data, and benchmark tasks. docs/eval.md explains it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fasttrain.cli.errors import user_errors
from fasttrain.cli.options import RUN_HELP, add_device, at_least, console, runtime_of, table

if TYPE_CHECKING:
    from fasttrain.distributed.runtime import Runtime
    from fasttrain.tools.trained_model import TrainedModel

PROGRAM = "fasttrain eval"


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: scored; 1: a loss is worse than guessing; 2: a mistake in the command."""
    options = _parser().parse_args(arguments)
    with user_errors(PROGRAM):
        _check(options)
    from fasttrain.rundir import RunDir
    from fasttrain.tools.evaluate import record
    from fasttrain.tools.report.page import write_report
    from fasttrain.tools.trained_model import load_model

    with user_errors(PROGRAM), runtime_of(options) as runtime:
        if options.tasks:
            import fasttrain.tools.harness  # noqa: F401  (before the work: a missing package shows at once)
        loaded = load_model(
            options.run, device=runtime.device, dtype=runtime.dtype, data=options.data, tokenizer=options.tokenizer
        )
        lines = _task_lines(options, loaded) if options.tasks else []
        if not options.tasks or options.set or options.sequences:
            lines += _set_lines(options, loaded, runtime)
        if runtime.is_main:
            _show(options, loaded, lines)
            if loaded.run is not None:
                record(loaded.run, lines)
                if (page := RunDir(loaded.run).report).exists():
                    write_report([loaded.run], page)
    return 1 if any(line.get("suspicion") for line in lines) else 0


def _check(options: argparse.Namespace) -> None:
    for name in ("fewshot", "limit", "include_path"):
        if getattr(options, name) is not None and not options.tasks:
            raise ValueError(
                f"--{name.replace('_', '-')} is for tasks, and there are none; add --tasks, or leave it out"
            )


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


def _task_lines(options: argparse.Namespace, loaded: TrainedModel) -> list[dict[str, Any]]:
    from fasttrain.tools.evaluate import task_lines
    from fasttrain.tools.harness import Harness, run_tasks

    harness = Harness(loaded, batch=options.batch or loaded.settings.batch.micro)
    results = run_tasks(
        harness, options.tasks, fewshot=options.fewshot, limit=options.limit, include=options.include_path
    )
    return task_lines(loaded.checkpoint.step, results)


def _show(options: argparse.Namespace, loaded: TrainedModel, lines: list[dict[str, Any]]) -> None:
    if options.json:
        for line in lines:
            print(json.dumps(line))
        return
    screen, checkpoint = console(), loaded.checkpoint
    screen.print(f"step {checkpoint.step} of {loaded.run or checkpoint.path}", soft_wrap=True)
    sets, tasks = ([line for line in lines if kind in line] for kind in ("set", "task"))
    if sets:
        screen.print(_set_table(screen, sets))
    if tasks:
        screen.print(_task_table(screen, tasks))
    for line in sets:
        if line["suspicion"]:
            screen.print(f"[bold red]{escape(line['set'])}: {escape(line['suspicion'])}[/]", soft_wrap=True)


def _set_table(screen: Console, lines: list[dict[str, Any]]) -> Table:
    rows = table(screen, "set", "loss", "perplexity", "bits per byte", "accuracy", "tokens")
    for line in lines:
        bits = line["bits_per_byte"]
        rows.add_row(
            escape(line["set"]),
            f"{line['loss']:.4f}",
            f"{line['perplexity']:,.4g}",
            "" if bits is None else f"{bits:.4f}",
            f"{line['accuracy']:.2%}",
            f"{line['tokens']:,}",
        )
    return _right(rows)


def _task_table(screen: Console, lines: list[dict[str, Any]]) -> Table:
    rows = table(screen, "task", "metric", "value", "stderr", "samples", "fewshot")
    for line in lines:
        stderr, filter = line["stderr"], line["filter"]
        rows.add_row(
            escape(line["task"]),
            escape(line["metric"] + ("" if filter == "none" else f" ({filter})")),
            f"{line['value']:.4f}",
            "" if stderr is None else f"{stderr:.4f}",
            *("" if line[key] is None else str(line[key]) for key in ("samples", "fewshot")),
        )
    return _right(rows)


def _right(rows: Table) -> Table:
    for column in rows.columns[1:]:
        column.justify = "left" if column.header == "metric" else "right"
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN[@STEP]", help=RUN_HELP)
    sets = parser.add_argument_group("sets: the run's held-out documents and validation.sets, and")
    sets.add_argument(
        "--set", action="append", default=[], type=_named, metavar="NAME=PATH", help="one more dataset; repeatable"
    )
    sets.add_argument("--sequences", type=at_least(1), metavar="N", help="of each set, at most; default: the whole set")
    tasks = parser.add_argument_group(
        "tasks of lm-evaluation-harness (pip install 'fasttrain[eval]'), without the sets"
    )
    tasks.add_argument("--tasks", type=_names, default=[], metavar="A,B", help="names of tasks or groups")
    tasks.add_argument("--fewshot", type=int, metavar="N", help="examples before each question; default: the task's")
    tasks.add_argument("--limit", type=at_least(1), metavar="N", help="questions of each task, to try it; default: all")
    tasks.add_argument("--include-path", type=Path, metavar="DIR", help="a directory with tasks of your own")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each result")
    parser.add_argument(
        "--batch", type=at_least(1), metavar="N", help="sequences at a time; default: batch.micro of the run"
    )
    parser.add_argument("--data", type=Path, metavar="PATH", help="where the run's data is now, if not where it was")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, of data that comes without one")
    add_device(parser)
    return parser


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=PATH, as wiki=data/wiki")
    return name, Path(path)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
