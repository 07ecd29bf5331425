"""fasttrain verify-resume: tries, with your settings, whether a run that is killed resumes as if it had not been.

It trains a few steps at once; again, killed on the way and started once more; and from the middle on another number of
ranks. Then it compares all losses, gradient norms, weights and optimizer state, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fasttrain.bounds import Bounds
from fasttrain.cli.options import command, console, flag, number, option
from fasttrain.units import plural

if TYPE_CHECKING:
    from fasttrain.tools.verify_resume import Trial

PROGRAM = "fasttrain verify-resume"
PREFIX = "fasttrain-verify-resume-"  # of the directory, where none is to be kept
STEPS = Bounds(1, 10**6)
STYLES = {"bitwise": "green", "within rounding": "green", "differs": "bold red", "not tried": "yellow"}


@command(
    "verify-resume",
    __doc__,
    number("--steps", "length of the runs", Bounds(2, 10**6), default=8),
    number("--kill-at", "kill once step K is saved; default: N / 2", STEPS, metavar="K"),
    number("--save-every", "steps between checkpoints, which all stay and are compared", STEPS, default=1),
    number("--ranks", "default: as many as there are GPUs; on a CPU as few as can be", Bounds(1, 1000), metavar="R"),
    number("--other-ranks", "to resume on from step K, 0: none; default: as can be", Bounds(0, 1000), metavar="R"),
    option("--keep", "leave runs, logs and verify_resume.json in DIR", type=Path, metavar="DIR"),
    flag("--json", "print the result as JSON"),
    takes_settings=True,
)
def main(options: argparse.Namespace) -> int:
    """Exit code 0: passed; 1: something differs, or a run failed; 2: a mistake; 128 + n: ended by signal n."""
    kill_at = _kill_at(options)  # mistakes show before torch is imported
    from fasttrain.tools.run_process import RunFailed
    from fasttrain.tools.verify_resume import plan_trial, verify_resume

    try:
        with ExitStack() as stack:
            trial = plan_trial(
                options.settings, steps=options.steps, kill_at=kill_at, save_every=options.save_every,
                ranks=options.ranks, other_ranks=options.other_ranks,
            )  # fmt: skip
            directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
            directory.mkdir(parents=True, exist_ok=True)
            found = verify_resume(trial, directory, stack.enter_context(_progress(trial)))
            if options.keep:
                (directory / "verify_resume.json").write_text(json.dumps(found, indent=1) + "\n")
    except RunFailed as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found, console())
    if not found["passed"] and not options.keep:
        print("--keep DIR keeps the runs, to look at them", file=sys.stderr)
    return 0 if found["passed"] else 1


@contextmanager
def _progress(trial: Trial) -> Iterator[Callable[[str, int], None]]:
    """Lines about what is running; on a terminal with its steps. On stderr: the result has stdout to itself."""
    screen = Console(stderr=True, highlight=False)
    changed = ", ".join(f"{change.key} {change.before!r} -> {change.after!r}" for change in trial.changed)
    screen.print(f"your settings, but for this: {changed}", markup=False)
    shown = ("", 0)
    with screen.status("") as status:

        def show(what: str, saved: int) -> None:
            nonlocal shown
            if what != shown[0]:
                screen.print(what, markup=False)
            if (what, saved) != shown:
                status.update(f"step {saved} is saved" if saved else "")
            shown = what, saved

        yield show


def _print(found: dict[str, Any], screen: Console) -> None:
    outcome = "[bold green]passed[/]" if found["passed"] else "[bold red]failed[/]"
    on_ranks = plural(found["ranks"], "rank")
    screen.print(f"\n{outcome}: {found['steps']} steps, killed after step {found['kill_at']}, on {on_ranks}")
    other = plural(found["other_ranks"], "rank") if found["other_ranks"] else "other ranks"
    titles = {"killed": "killed", "moved": f"on {other}"}
    rows = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for each in found["results"]:
        result = f"[{STYLES[each['result']]}]{each['result']}[/]"
        rows.add_row(titles[each["name"]], f"{result}: {escape(each['text'])}")
    hardware = found["hardware"]
    rows.add_row("settings", f"sha256 {found['settings']['sha256']}")
    rows.add_row("data", f"sha256 {found['data']}")
    rows.add_row("machine", escape(f"{hardware['device']}: {hardware['name']}, {hardware['precision']}"))
    rows.add_row("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    rows.add_row("seconds", ", ".join(f"{name} {seconds}" for name, seconds in found["seconds"].items()))
    screen.print(rows)


def _kill_at(options: argparse.Namespace) -> int:
    """The step to kill a run after."""
    steps, every, keep, resume = options.steps, options.save_every, options.keep, options.settings.resume
    kill_at = options.kill_at or max(steps // 2 // every, 1) * every
    if "RANK" in os.environ:
        raise ValueError("it starts its ranks itself; call it without torchrun")
    if resume not in ("auto", "never"):
        raise ValueError(f"--resume {resume}: the runs that are compared begin at step 0; remove it")
    if kill_at % every or kill_at >= steps:
        raise ValueError(
            f"--kill-at {kill_at} must be a step that is saved, a multiple of --save-every ({every}), and below "
            f"--steps ({steps})"
        )
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ValueError(f"--keep {keep} must be a new or an empty directory")
    return kill_at
