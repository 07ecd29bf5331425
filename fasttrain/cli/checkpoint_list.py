"""fasttrain checkpoint list: the checkpoints of a run, as far as checkpoint.json tells; verify reads the rest too."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.markup import escape

from fasttrain.checkpoint import Checkpoint
from fasttrain.cli.checkpoints import console, directory_of, loss, read_all, size, table
from fasttrain.cli.errors import user_errors


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: all can be read; 1: some cannot; 2: a mistake in the command."""
    options = _parser().parse_args(arguments)
    with user_errors("fasttrain checkpoint list"):
        found = read_all(directory_of(options.run))
    readable = [checkpoint for _, checkpoint in found if isinstance(checkpoint, Checkpoint)]
    best = _best(readable)
    screen = console()
    rows = table(screen, "step", "loss", "size", "saved", "ranks", "")
    for path, checkpoint in found:
        if isinstance(checkpoint, str):
            rows.add_row(path.name, "", "", "", "", f"[bold red]damaged: {escape(checkpoint)}[/]")
            continue
        saved = datetime.fromtimestamp(os.stat(path).st_mtime).strftime("%Y-%m-%d %H:%M:%S")
        world = str(checkpoint.metadata.get("world_size", ""))
        marks = ", ".join(name for name, one in (("newest", readable[-1]), ("best", best)) if one is checkpoint)
        rows.add_row(str(checkpoint.step), loss(checkpoint), size(checkpoint.bytes), saved, world, f"[green]{marks}[/]")
    screen.print(rows)
    total = sum(checkpoint.bytes for checkpoint in readable)
    screen.print(f"{len(found)} in {options.run}: {size(total)}", soft_wrap=True)
    return 0 if len(readable) == len(found) else 1


def _best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    scored = [(c.loss, -c.step, c) for c in checkpoints if c.loss is not None and math.isfinite(c.loss)]
    return min(scored, key=lambda entry: entry[:2])[2] if scored else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fasttrain checkpoint list", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run, as runs/tiny")
    return parser
