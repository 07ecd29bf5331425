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

# Each waits in its own work, for as long as it takes until the signal: a call that the command makes, made endless
WAITING = """
import pkgutil, sys, time
from fasttrain.cli import main
module, _, name = {where!r}.rpartition(".")
def wait(*_, **__):
    print("at work", file=sys.stdout, flush=True)
    while True:
        time.sleep(0.05)
if {inside}:
    setattr(pkgutil.resolve_name(module), name, wait)
else:
    print("at work", flush=True)
sys.exit(main({words!r}))
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
    where, rest = WORK[name]
    run = Path(shutil.copytree(small_run, tmp_path / "run", symlinks=True))
    before = sorted(path for path in run.rglob("*") if path.name != ".lock")
    out = tmp_path / "out"
    out.mkdir()
    words = [*name.split(), *(word.format(run=run, tmp=out) for word in rest.split())]
    code = WAITING.format(where=where, inside=inside, words=words)
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(out)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=out
    ) as process:
        while (line := process.stdout.readline()) and line != "at work\n":
            pass
        if not inside:
            time.sleep(0.4)  # somewhere in imports and arguments
        process.send_signal(number)
        err = process.communicate(timeout=60)[1]
    said = {signal.SIGINT: f"fasttrain {name}: interrupted", signal.SIGTERM: f"fasttrain {name}: ended by SIGTERM"}
    if process.returncode == 0 and not inside:
        pytest.skip("it was faster")
    assert process.returncode == 128 + number, err
    assert err.splitlines()[-1].startswith((said[number], "interrupted; the same command resumes")), err
    assert "Traceback" not in err
    assert sorted(path for path in run.rglob("*") if path.name != ".lock") == before
    left = [path.name for path in out.rglob("*") if "fasttrain" not in path.name]
    assert left == [] or name == "data prepare"  # whose work is resumed
