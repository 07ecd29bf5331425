"""fasttrain checkpoint list, verify and prune: the checkpoints of a run, and what is wrong with them."""

from __future__ import annotations

import argparse
import math
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape

from fasttrain.bounds import Bounds
from fasttrain.cli.options import RUN, RUN_DIRECTORY, command, console, flag, number, table
from fasttrain.units import disk_size

if TYPE_CHECKING:
    from fasttrain.checkpoint.committed import Checkpoint


@command(
    "checkpoint list",
    "The checkpoints of a run, as far as checkpoint.json tells; verify reads the rest too.",
    RUN_DIRECTORY,
)
def list_command(options: argparse.Namespace) -> int:
    """Exit code 0: all can be read; 1: some cannot; 2: a mistake in the command."""
    from fasttrain.checkpoint.committed import paths_of

    found = [_examine(path, verify=False) for path in paths_of(options.run)]
    readable = [checkpoint for _, checkpoint, _ in found if checkpoint]
    scored = [(c.loss, -c.step, c) for c in readable if c.loss is not None and math.isfinite(c.loss)]
    best = min(scored, key=lambda entry: entry[:2])[2] if scored else None
    screen = console()
    rows = table(screen, "step", "loss", "size", "saved", "ranks", "")
    for path, checkpoint, fault in found:
        if checkpoint is None:
            rows.add_row(path.name, "", "", "", "", f"[bold red]corrupt: {escape(fault)}[/]")
            continue
        saved = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
        ranks = str(checkpoint.metadata.get("world_size", ""))
        marks = ", ".join(name for name, one in (("newest", readable[-1]), ("best", best)) if one is checkpoint)
        rows.add_row(*_cells(checkpoint), saved, ranks, f"[green]{marks}[/]")
    screen.print(rows)
    total = sum(checkpoint.bytes for checkpoint in readable)
    screen.print(f"{len(found)} in {options.run}: {disk_size(total)}", soft_wrap=True)
    return 0 if len(readable) == len(found) else 1


@command(
    "checkpoint verify", "Read every file of a run's checkpoints and compare it with what was written.", RUN
)  # fmt: skip
def verify_command(options: argparse.Namespace) -> int:
    """Exit code 0: all are valid; 1: some are corrupt; 2: a mistake in the command."""
    from fasttrain.checkpoint.committed import paths_of

    found = [_examine(path, verify=True) for path in paths_of(options.run)]
    screen = console()
    rows = table(screen, "step", "size", "")
    for path, checkpoint, fault in found:
        step, _, size = _cells(checkpoint) if checkpoint else (path.name, "", "")
        rows.add_row(step, size, f"[bold red]corrupt: {escape(fault)}[/]" if fault else "[green]valid[/]")
    screen.print(rows)
    corrupt = sum(bool(fault) for *_, fault in found)
    screen.print(f"{len(found) - corrupt} valid, {corrupt} corrupt", soft_wrap=True)
    screen.print("valid: as checkpoint.json says, and no code in it; who wrote both, checksums cannot tell")
    return 1 if corrupt else 0


@command(
    "checkpoint prune",
    "Delete old checkpoints of a run that is not being trained. The newest valid ones and the best stay.",
    RUN_DIRECTORY,
    number("--keep", "the newest valid ones", Bounds(1, 10**6), required=True),
    flag("--dry-run", "only show what would go"),
)
def prune_command(options: argparse.Namespace) -> int:
    """Exit code 0: done, and all that is left is valid; 1: something is corrupt, or cannot be deleted; 2: a mistake."""
    from fasttrain.checkpoint.committed import paths_of
    from fasttrain.checkpoint.retention import delete, expendable
    from fasttrain.config import CheckpointConfig
    from fasttrain.fs import exclusive_lock
    from fasttrain.rundir import RunDir

    rundir = RunDir(options.run)
    paths_of(options.run)  # raises before the lock makes its directory
    if not rundir.checkpoints.is_dir():
        raise ValueError(
            f"{options.run} is not the directory of a run; name the one with {rundir.checkpoints.name} in it"
        )
    with exclusive_lock(rundir.lock, f"another process is training in {options.run}"):
        found = [_examine(path, verify=True) for path in paths_of(options.run)]
        valid = [checkpoint for _, checkpoint, fault in found if checkpoint and not fault]
        problems = [f"{path.name} is corrupt and stays: {fault}" for path, _, fault in found if fault]
        # Only valid ones count: a corrupt checkpoint does not make a valid one expendable
        going = expendable(valid, CheckpointConfig(keep_last=options.keep, keep_best=True)) if valid else []
        fates = dict.fromkeys((checkpoint.path for checkpoint in going), "would go" if options.dry_run else "deleted")
        for path in fates if not options.dry_run else ():
            try:
                delete(path)
            except OSError as error:
                problems.append(f"{path} could not be deleted: {error}")
                fates[path] = "could not be deleted"
    screen = console()
    rows = table(screen, "step", "loss", "size", "")
    for checkpoint in valid:
        rows.add_row(*_cells(checkpoint), fates.get(checkpoint.path, "stays"))
    screen.print(rows)
    for line in problems:
        print(f"fasttrain checkpoint prune: warning: {line}", file=sys.stderr)
    outcome = f"{len(going)} {'would go' if options.dry_run else 'deleted'}"
    freed = disk_size(sum(checkpoint.bytes for checkpoint in going))
    screen.print(f"{len(valid) - len(going)} stay, {outcome}: {freed}", soft_wrap=True)
    return 1 if problems else 0


class Examined(NamedTuple):
    """A checkpoint's directory and what was found there."""

    path: Path
    checkpoint: Checkpoint | None  # None: its checkpoint.json cannot be read
    fault: str  # empty: none


def _examine(path: Path, *, verify: bool) -> Examined:
    """Read its checkpoint.json; to verify, all its files too."""
    from fasttrain.checkpoint.committed import Checkpoint

    if verify:
        from fasttrain.checkpoint.state import verify_weights  # torch

    checkpoint, fault = None, ""
    try:
        checkpoint = Checkpoint.read(path)
        if verify:
            checkpoint.verify()
            verify_weights(checkpoint)
    except Exception as error:  # whatever the disk does, it is this checkpoint that has it
        fault = (str(error) or repr(error)).removeprefix("checkpoint: ").removesuffix("; resume from an earlier one")
    return Examined(path, checkpoint, fault)


def _cells(checkpoint: Checkpoint) -> tuple[str, str, str]:
    """Step, loss and size."""
    loss = "" if checkpoint.loss is None else f"{checkpoint.loss:.4f}"
    return str(checkpoint.step), loss, disk_size(checkpoint.bytes)
