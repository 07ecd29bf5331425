"""fasttrain checkpoint verify: reads every file of a run's checkpoints and compares it with what was written."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from fasttrain.checkpoint import Checkpoint
from fasttrain.cli.checkpoints import console, damage, directory_of, read_all, size, table
from fasttrain.cli.errors import user_errors


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: all are sound; 1: some are damaged; 2: a mistake in the command."""
    options = _parser().parse_args(arguments)
    with user_errors("fasttrain checkpoint verify"):
        found = _asked_for(options.what)
    screen, damaged = console(), 0
    rows = table(screen, "step", "size", "")
    for path, checkpoint in found:
        if isinstance(checkpoint, str):
            step, length, wrong = path.name, "", checkpoint
        else:
            step, length, wrong = str(checkpoint.step), size(checkpoint.bytes), damage(checkpoint)
        rows.add_row(step, length, f"[bold red]damaged: {escape(wrong)}[/]" if wrong else "[green]sound[/]")
        damaged += bool(wrong)
    screen.print(rows)
    screen.print(f"{len(found) - damaged} sound, {damaged} damaged", soft_wrap=True)
    return 1 if damaged else 0


def _asked_for(what: str) -> list[tuple[Path, Checkpoint | str]]:
    """All checkpoints of a run; or the one that RUN@STEP or its own directory means."""
    path = Path(what)
    if path.name.startswith("step-"):
        found = [entry for entry in read_all(path.parent) if entry[0] == path]
        if not found:
            raise FileNotFoundError(f"{path} does not exist; name a run, RUN@STEP, or the directory of a checkpoint")
        return found
    run, at, step = what.rpartition("@")
    if not at or path.exists():
        return read_all(directory_of(path))
    by_step = {_step(entry[0]): entry for entry in read_all(directory_of(Path(run)))}  # of one step, the last
    if not step.isdecimal() or int(step) not in by_step:
        raise ValueError(f"{run} has no checkpoint of step {step!r}; it has {', '.join(map(str, by_step))}")
    return [by_step[int(step)]]


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fasttrain checkpoint verify", description=__doc__, allow_abbrev=False)
    parser.add_argument("what", metavar="RUN[@STEP]", help="a run, one of its steps, or a checkpoint's own directory")
    return parser
