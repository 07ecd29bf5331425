"""Ctrl-C and SIGTERM, in every command and at two moments: one line, exit code 130 or 143, nothing half-written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fasttrain.cli import COMMANDS

WAITING = """
import pkgutil, sys, time
from fasttrain.cli import COMMANDS, main
def wait(*_, **__):
    print("at work", flush=True)
    while {endless}:
        time.sleep(0.05)
class Importing:
    def find_spec(self, module, *_):
        if module == COMMANDS[{name!r}].module:
            wait()
if {inside}:
    module, _, name = {where!r}.rpartition(".")
    setattr(pkgutil.resolve_name(module), name, wait)
else:
    sys.meta_path.insert(0, Importing())
code = main({words!r})
print("complete", flush=True)
sys.exit(code)
"""
WORK = {  # where a command is when the signal comes, and its words
    "plan": ("fasttrain.cli.plan.estimate", "--gpu a10 --html {tmp}/x.html"),
    "doctor": ("fasttrain.tools.doctor.examine.examine", "--quick"),
    "verify-resume": ("fasttrain.tools.verify_resume.plan_trial", "--keep {tmp}/kept"),
    "data prepare": ("fasttrain.data.prepare.preparation.split_inputs", "{run}/config.toml --out {tmp}/d --workers 1"),
    "data lint": ("fasttrain.data.lint.lint", "--quick --json {tmp}/x.json"),
    "data locate": ("fasttrain.data.locate.locate", "{run} --step 1"),
    "export": ("fasttrain.hf.export.save_file", "{run} --out {tmp}/e"),
    "generate": ("fasttrain.tools.generate.generate", "{run} --prompt a"),
    "eval": ("fasttrain.tools.evaluate.score_sets", "{run}"),
    "report": ("fasttrain.tools.report.page.page", "{run} --out {tmp}/x.html"),
    "checkpoint list": ("fasttrain.checkpoint.committed.Checkpoint.read", "{run}"),
    "checkpoint verify": ("fasttrain.checkpoint.state.verify_weights", "{run}"),
    "checkpoint prune": ("fasttrain.checkpoint.retention.expendable", "{run} --keep 1"),
}


def test_every_command_is_here():
    assert {*WORK, "train"} == {*COMMANDS}  # train saves before it ends: tests/faults/test_signals.py


@pytest.mark.parametrize(
    ("number", "inside"),
    [
        pytest.param(signal.SIGINT, True, id="Ctrl-C at work"),
        pytest.param(signal.SIGTERM, False, id="SIGTERM as it begins"),
        pytest.param(signal.SIGINT, False, id="Ctrl-C as it begins", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, id="SIGTERM at work", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", WORK)
def test_a_signal_ends_a_command_in_a_line(small_run, tmp_path, name, number, inside):
    """At work: in a call that it makes, made endless. As it begins: a moment after its first import, somewhere in
    imports and arguments; a command that is faster than that gets it earlier, and at last in an endless import."""
    for moment in (None,) if inside else (0.4, 0.1, None):
        code, out, err = signalled(small_run, tmp_path / str(moment), name, number, inside=inside, moment=moment)
        if "complete\n" not in out:  # otherwise it was faster
            break
    said = {signal.SIGINT: f"fasttrain {name}: interrupted", signal.SIGTERM: f"fasttrain {name}: ended by SIGTERM"}
    assert code == 128 + number, err
    assert err.splitlines()[-1].startswith((said[number], "interrupted; the same command resumes")), err
    assert "Traceback" not in err
    run = tmp_path / str(moment) / "run"
    assert content(run) == {path.replace(str(small_run), str(run)) for path in content(small_run)}
    left = [path.name for path in (run.parent / "out").rglob("*") if "fasttrain" not in path.name]
    assert left == [] or name == "data prepare"  # whose work is resumed


def signalled(
    small_run: Path, directory: Path, name: str, number: int, *, inside: bool, moment: float | None
) -> tuple[int, str, str]:
    """Exit code, output and errors of a command that is sent a signal; moment: seconds after its mark, where it waits
    if that is None."""
    where, rest = WORK[name]
    run = Path(shutil.copytree(small_run, directory / "run", symlinks=True))
    out = directory / "out"
    out.mkdir()
    words = [*name.split(), *(word.format(run=run, tmp=out) for word in rest.split())]
    code = WAITING.format(name=name, where=where, inside=inside, endless=moment is None, words=words)
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(out)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=out
    ) as process:
        lines = iter(process.stdout.readline, "")
        assert "at work\n" in lines, process.communicate()[1]  # otherwise it ended without having been there
        time.sleep(moment or 0.0)
        process.send_signal(number)
        said, err = process.communicate(timeout=300)
    return process.returncode, said, err


def content(run: Path) -> set[str]:
    return {str(path) for path in run.rglob("*") if path.name != ".lock"}
