"""What the commands about checkpoints share: which ones a run has, and how they are shown."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fasttrain.checkpoint import Checkpoint, committed_paths
from fasttrain.rundir import RunDir


def directory_of(run: Path) -> Path:
    """Where a run has its checkpoints; an error if it has none."""
    if not run.is_dir():
        raise FileNotFoundError(f"{run} {'is not a directory' if run.exists() else 'does not exist'}; name a run")
    directory = RunDir(run).checkpoints
    if not committed_paths(directory):
        raise ValueError(f"there are no checkpoints in {directory}; is {run} the directory of a run?")
    return directory


def read_all(directory: Path) -> list[tuple[Path, Checkpoint | str]]:
    """Every checkpoint by step, or what is wrong with its checkpoint.json."""
    return [(path, _read(path)) for path in committed_paths(directory)]


def damage(checkpoint: Checkpoint) -> str:
    """What is wrong with its files, all of which are read; empty if nothing is."""
    try:
        checkpoint.verify()
    except Exception as error:  # whatever the disk does, it is this checkpoint that has it
        return _plain(error)
    return ""


def console() -> Console:
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=120)  # a file has no width of its own


def table(console: Console, *columns: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in ("step", "size", "loss") else "left")
    return made


def size(bytes: int) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes >= least:
            return f"{bytes / least:,.1f} {unit}"
    return f"{bytes} B"


def loss(checkpoint: Checkpoint) -> str:
    return "" if checkpoint.loss is None else f"{checkpoint.loss:.4f}"


def _read(path: Path) -> Checkpoint | str:
    try:
        return Checkpoint.read(path)
    except (ValueError, OSError, KeyError, TypeError) as error:
        return _plain(error)


def _plain(error: Exception) -> str:
    return str(error).removeprefix("checkpoint: ").removesuffix("; resume from an earlier one")
