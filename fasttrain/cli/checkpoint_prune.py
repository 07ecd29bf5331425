"""fasttrain checkpoint prune: deletes old checkpoints of a run. The newest sound ones and the best stay."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fasttrain import config
from fasttrain.checkpoint import Checkpoint
from fasttrain.checkpoint.retention import delete, expendable
from fasttrain.cli.checkpoints import console, damage, directory_of, loss, read_all, size, table
from fasttrain.cli.errors import user_errors
from fasttrain.fs import exclusive_lock
from fasttrain.rundir import RunDir

PROGRAM = "fasttrain checkpoint prune"


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: done, and all that is left is sound; 1: something is damaged, or cannot go; 2: a mistake."""
    options = _parser().parse_args(arguments)
    with user_errors(PROGRAM):
        directory = directory_of(options.run)
        with exclusive_lock(
            RunDir(options.run).lock, f"another process is training in {options.run}"
        ):  # not under the feet of a run
            return _prune(directory, keep=options.keep, dry=options.dry_run)


def _prune(directory: Path, *, keep: int, dry: bool) -> int:
    sound, damaged = [], []
    for path, checkpoint in read_all(directory):
        wrong = checkpoint if isinstance(checkpoint, str) else damage(checkpoint)
        if isinstance(checkpoint, str) or wrong:
            damaged.append(f"{path.name} is damaged and stays: {wrong}")
        else:
            sound.append(checkpoint)
    going = _going(sound, keep)
    screen, left = console(), [checkpoint for checkpoint in sound if checkpoint not in going]
    rows = table(screen, "step", "loss", "size", "")
    for checkpoint in sound:
        fate = ("would go" if dry else "deleted") if checkpoint in going else "stays"
        if checkpoint in going and not dry and (trouble := _delete(checkpoint)):
            damaged.append(trouble)
            fate = "could not be deleted"
        rows.add_row(str(checkpoint.step), loss(checkpoint), size(checkpoint.bytes), fate)
    screen.print(rows)
    for line in damaged:
        print(f"{PROGRAM}: warning: {line}", file=sys.stderr)
    freed = size(sum(checkpoint.bytes for checkpoint in going))
    screen.print(f"{len(left)} stay, {len(going)} {'would go' if dry else 'deleted'}: {freed}", soft_wrap=True)
    return 1 if damaged else 0


def _going(sound: list[Checkpoint], keep: int) -> list[Checkpoint]:
    """Sound ones only count: a damaged checkpoint does not make a sound one expendable."""
    return expendable(sound, config.CheckpointConfig(keep_last=keep, keep_best=True)) if sound else []


def _delete(checkpoint: Checkpoint) -> str:
    """What went wrong; empty if nothing did."""
    try:
        delete(checkpoint.path)
    except OSError as error:
        return f"{checkpoint.path} could not be deleted: {error}"
    return ""


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1: the newest checkpoint always stays")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run that is not being trained")
    parser.add_argument("--keep", type=_at_least_one, required=True, metavar="N", help="the newest sound ones")
    parser.add_argument("--dry-run", action="store_true", help="only show what would go")
    return parser
