"""fasttrain checkpoint list, verify and prune: the checkpoints of a run, and what is wrong with them."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from fasttrain.cli.errors import user_errors
from fasttrain.cli.options import RUN_HELP, at_least, console, table
from fasttrain.units import disk_size

if TYPE_CHECKING:
    from fasttrain.checkpoint import Checkpoint

PRUNE = "fasttrain checkpoint prune"


def list_command(arguments: Sequence[str]) -> int:
    """Exit code 0: all can be read; 1: some cannot; 2: a mistake in the command."""
    options = _list_parser().parse_args(arguments)
    with user_errors("fasttrain checkpoint list"):
        found = _read_all(_directory(options.run))
    readable = [checkpoint for _, checkpoint in found if not isinstance(checkpoint, str)]
    best = _best(readable)
    screen = console()
    rows = table(screen, "step", "loss", "size", "saved", "ranks", "")
    for path, checkpoint in found:
        if isinstance(checkpoint, str):
            rows.add_row(path.name, "", "", "", "", f"[bold red]corrupt: {escape(checkpoint)}[/]")
            continue
        saved = datetime.fromtimestamp(os.stat(path).st_mtime).strftime("%Y-%m-%d %H:%M:%S")
        ranks = str(checkpoint.metadata.get("world_size", ""))
        marks = ", ".join(name for name, one in (("newest", readable[-1]), ("best", best)) if one is checkpoint)
        size = disk_size(checkpoint.bytes)
        rows.add_row(str(checkpoint.step), _loss(checkpoint), size, saved, ranks, f"[green]{marks}[/]")
    screen.print(rows)
    total = sum(checkpoint.bytes for checkpoint in readable)
    screen.print(f"{len(found)} in {options.run}: {disk_size(total)}", soft_wrap=True)
    return 0 if len(readable) == len(found) else 1


def verify_command(arguments: Sequence[str]) -> int:
    """Exit code 0: all are valid; 1: some are corrupt; 2: a mistake in the command."""
    options = _verify_parser().parse_args(arguments)
    with user_errors("fasttrain checkpoint verify"):
        found = _asked_for(options.what)
    screen, corrupt = console(), 0
    rows = table(screen, "step", "size", "")
    for path, checkpoint in found:
        if isinstance(checkpoint, str):
            step, size, wrong = path.name, "", checkpoint
        else:
            step, size, wrong = str(checkpoint.step), disk_size(checkpoint.bytes), _corruption(checkpoint)
        rows.add_row(step, size, f"[bold red]corrupt: {escape(wrong)}[/]" if wrong else "[green]valid[/]")
        corrupt += bool(wrong)
    screen.print(rows)
    screen.print(f"{len(found) - corrupt} valid, {corrupt} corrupt", soft_wrap=True)
    return 1 if corrupt else 0


def prune_command(arguments: Sequence[str]) -> int:
    """Exit code 0: done, and all that is left is valid; 1: something is corrupt, or cannot be deleted; 2: a mistake."""
    options = _prune_parser().parse_args(arguments)
    from fasttrain.fs import exclusive_lock
    from fasttrain.rundir import RunDir

    with user_errors(PRUNE):
        directory, taken = _directory(options.run), f"another process is training in {options.run}"
        with exclusive_lock(RunDir(options.run).lock, taken):
            return _prune(directory, keep=options.keep, dry=options.dry_run)


def _prune(directory: Path, *, keep: int, dry: bool) -> int:
    from fasttrain.checkpoint.retention import expendable
    from fasttrain.config import CheckpointConfig

    valid, problems = [], []
    for path, checkpoint in _read_all(directory):
        wrong = checkpoint if isinstance(checkpoint, str) else _corruption(checkpoint)
        if isinstance(checkpoint, str) or wrong:
            problems.append(f"{path.name} is corrupt and stays: {wrong}")
        else:
            valid.append(checkpoint)
    # Only valid ones count: a corrupt checkpoint does not make a valid one expendable
    going = expendable(valid, CheckpointConfig(keep_last=keep, keep_best=True)) if valid else []
    screen = console()
    rows = table(screen, "step", "loss", "size", "")
    for checkpoint in valid:
        fate = ("would go" if dry else "deleted") if checkpoint in going else "stays"
        if checkpoint in going and not dry and (problem := _delete(checkpoint)):
            problems.append(problem)
            fate = "could not be deleted"
        rows.add_row(str(checkpoint.step), _loss(checkpoint), disk_size(checkpoint.bytes), fate)
    screen.print(rows)
    for line in problems:
        print(f"{PRUNE}: warning: {line}", file=sys.stderr)
    freed, left = disk_size(sum(checkpoint.bytes for checkpoint in going)), len(valid) - len(going)
    screen.print(f"{left} stay, {len(going)} {'would go' if dry else 'deleted'}: {freed}", soft_wrap=True)
    return 1 if problems else 0


def _directory(run: Path) -> Path:
    """Where a run has its checkpoints; an error if it has none."""
    from fasttrain.checkpoint import committed_paths
    from fasttrain.rundir import RunDir

    if not run.is_dir():
        raise FileNotFoundError(f"{run} {'is not a directory' if run.exists() else 'does not exist'}; name a run")
    directory = RunDir(run).checkpoints
    if not committed_paths(directory):
        raise ValueError(f"there are no checkpoints in {directory}; is {run} the directory of a run?")
    return directory


def _read_all(directory: Path) -> list[tuple[Path, Checkpoint | str]]:
    """Every checkpoint by step, or what is wrong with its checkpoint.json."""
    from fasttrain.checkpoint import committed_paths

    return [(path, _read(path)) for path in committed_paths(directory)]


def _read(path: Path) -> Checkpoint | str:
    from fasttrain.checkpoint import Checkpoint

    try:
        return Checkpoint.read(path)
    except (ValueError, OSError, KeyError, TypeError) as error:
        return _plain(error)


def _asked_for(what: str) -> list[tuple[Path, Checkpoint | str]]:
    """All checkpoints of a run; or the one that RUN@STEP or its own directory means."""
    path = Path(what)
    if path.name.startswith("step-"):
        found = [entry for entry in _read_all(path.parent) if entry[0] == path]
        if not found:
            raise FileNotFoundError(f"{path} does not exist; name a run, RUN@STEP, or the directory of a checkpoint")
        return found
    run, at, step = what.rpartition("@")
    if not at or path.exists():
        return _read_all(_directory(path))
    found = _read_all(_directory(Path(run)))
    by_step = {int(entry[0].name.split("-")[1]): entry for entry in found}  # of one step, the last
    if not step.isdecimal() or int(step) not in by_step:
        raise ValueError(f"{run} has no checkpoint of step {step!r}; it has {', '.join(map(str, by_step))}")
    return [by_step[int(step)]]


def _corruption(checkpoint: Checkpoint) -> str:
    """Read all its files and say what is wrong with them; empty if nothing is."""
    try:
        checkpoint.verify()
    except Exception as error:  # whatever the disk does, it is this checkpoint that has it
        return _plain(error)
    return ""


def _delete(checkpoint: Checkpoint) -> str:
    """Delete it; what went wrong, or empty."""
    from fasttrain.checkpoint.retention import delete

    try:
        delete(checkpoint.path)
    except OSError as error:
        return f"{checkpoint.path} could not be deleted: {error}"
    return ""


def _best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    scored = [(c.loss, -c.step, c) for c in checkpoints if c.loss is not None and math.isfinite(c.loss)]
    return min(scored, key=lambda entry: entry[:2])[2] if scored else None


def _loss(checkpoint: Checkpoint) -> str:
    return "" if checkpoint.loss is None else f"{checkpoint.loss:.4f}"


def _plain(error: Exception) -> str:
    return str(error).removeprefix("checkpoint: ").removesuffix("; resume from an earlier one")


def _list_parser() -> argparse.ArgumentParser:
    description = "The checkpoints of a run, as far as checkpoint.json tells; verify reads the rest too."
    parser = argparse.ArgumentParser(
        prog="fasttrain checkpoint list", description=description, allow_abbrev=False
    )  # fmt: skip
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run, as runs/tiny")
    return parser


def _verify_parser() -> argparse.ArgumentParser:
    description = "Read every file of a run's checkpoints and compare it with what was written."
    parser = argparse.ArgumentParser(
        prog="fasttrain checkpoint verify", description=description, allow_abbrev=False
    )  # fmt: skip
    parser.add_argument("what", metavar="RUN[@STEP]", help=RUN_HELP)
    return parser


def _prune_parser() -> argparse.ArgumentParser:
    description = "Delete old checkpoints of a run. The newest valid ones and the best stay."
    parser = argparse.ArgumentParser(prog=PRUNE, description=description, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run that is not being trained")
    least_one = at_least(1, ": the newest checkpoint always stays")
    parser.add_argument("--keep", type=least_one, required=True, metavar="N", help="the newest valid ones")
    parser.add_argument("--dry-run", action="store_true", help="only show what would go")
    return parser
