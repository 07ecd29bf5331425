"""fasttrain verify-resume: tries, with your settings, whether a run that is killed resumes as if it had not been.

It trains a few steps at once; again, killed on the way and started once more; and from the middle on another number of
ranks. Then it compares all losses, gradient norms, weights and optimizer state, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fasttrain.cli.errors import user_errors
from fasttrain.cli.options import at_least, console
from fasttrain.cli.parse import load
from fasttrain.recipes import RECIPES
from fasttrain.units import plural

if TYPE_CHECKING:
    from fasttrain.config import Config
    from fasttrain.tools.verify_resume import Trial

PROGRAM = "fasttrain verify-resume"
STYLES = {"bitwise": "green", "within rounding": "green", "differs": "bold red", "not tried": "yellow"}


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: passed; 1: something differs, or a run failed; 2: a mistake; 128 + n: ended by signal n."""
    options, rest = _parser().parse_known_args(arguments)
    settings = load(rest, RECIPES, PROGRAM)
    with user_errors(PROGRAM):
        kill_at = _kill_at(options, settings)
    from fasttrain.tools.run_process import RunFailed
    from fasttrain.tools.verify_resume import plan_trial, verify_resume

    try:
        with user_errors(PROGRAM), _ended_by_signals():
            trial = plan_trial(
                settings, steps=options.steps, kill_at=kill_at, save_every=options.save_every,
                ranks=options.ranks, other_ranks=options.other_ranks,
            )  # fmt: skip
            with _directory(options.keep) as directory, _TrialProgress() as progress:
                progress.announce(trial)
                found = verify_resume(trial, directory, progress.show)
                if options.keep:
                    (directory / "verify_resume.json").write_text(json.dumps(found, indent=1) + "\n")
    except RunFailed as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; its runs are ended", file=sys.stderr)
        return 128 + signal.SIGINT
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found, console())
    if not found["passed"] and not options.keep:
        print("--keep DIR keeps the runs, to look at them", file=sys.stderr)
    return 0 if found["passed"] else 1


class _TrialProgress:
    """Lines about what is running; on a terminal with its steps. On stderr: the result has stdout to itself."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("")
        self._shown = ("", 0)

    def announce(self, trial: Trial) -> None:
        """Say what differs from the user's settings."""
        changed = ", ".join(f"{change.key} {change.before!r} -> {change.after!r}" for change in trial.changed)
        self._console.print(f"your settings, but for this: {changed}", markup=False)

    def show(self, what: str, saved: int) -> None:
        if what != self._shown[0]:
            self._console.print(what, markup=False)
        if (what, saved) != self._shown:
            self._status.update(f"step {saved} is saved" if saved else "")
        self._shown = what, saved

    def __enter__(self) -> _TrialProgress:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()


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


def _kill_at(options: argparse.Namespace, settings: Config) -> int:
    """The step to kill a run after. Mistakes of the user show here, before torch is imported."""
    steps, every, keep = options.steps, options.save_every, options.keep
    kill_at = options.kill_at or max(steps // 2 // every, 1) * every
    if "RANK" in os.environ:
        raise ValueError("it starts its ranks itself; call it without torchrun")
    if settings.resume not in ("auto", "never"):
        raise ValueError(f"--resume {settings.resume}: the runs that are compared begin at step 0; remove it")
    if kill_at % every or kill_at >= steps:
        raise ValueError(
            f"--kill-at {kill_at} must be a step that is saved, a multiple of --save-every ({every}), and below "
            f"--steps ({steps})"
        )
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ValueError(f"--keep {keep} must be a new or an empty directory")
    return kill_at


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="fasttrain-verify-resume-") as directory:
            yield Path(directory)
        return
    keep.mkdir(parents=True, exist_ok=True)
    yield keep


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the program, as Ctrl-C does, so that no run is left behind."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        epilog="Everything else says which settings, as for fasttrain train: --recipe, --config, --optim.lr 3e-4, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=at_least(2), default=8, metavar="N", help="length of the runs (default: 8)")
    parser.add_argument("--kill-at", type=at_least(1), metavar="K", help="kill once step K is saved (default: N / 2)")
    parser.add_argument(
        "--save-every", type=at_least(1), default=1, metavar="S",
        help="steps between checkpoints, which are compared and all stay until the end (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=at_least(1), metavar="R", help="default: as many as there are GPUs; on a CPU as few as can be"
    )
    parser.add_argument(
        "--other-ranks", type=at_least(0), metavar="R",
        help="resume from step K on so many (default: another number that is possible; 0: none)",
    )  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave runs, logs and verify_resume.json in DIR")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser
