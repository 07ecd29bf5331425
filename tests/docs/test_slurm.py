"""examples/slurm.sh with stand-ins for Slurm's own commands: what it starts, and that it goes back into the queue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.docs.elsewhere import is_launch
from tests.docs.pages import ROOT

SCRIPT = ROOT / "examples" / "slurm.sh"
RUN = ["--recipe", "llama2-7b", "--data.path", "data/mine", "--out", "runs/7b"]
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > started.tmp && mv started.tmp started
trap 'echo saved > saved; exit 143' TERM
[ -n "$HOLD" ] && for _ in {1..300}; do sleep 0.1; done
exit ${CODE:-0}
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && printf 'node7\\nnode8\\n' || echo "$@" > requeued
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(place: Path, **more: str) -> subprocess.Popen:
    slurm = dict(SLURM_JOB_NODELIST="node[7-8]", SLURM_NNODES="2", SLURM_JOB_ID="42")
    environment = dict(PATH=f"{place}:{os.environ['PATH']}", **slurm, **more)
    return subprocess.Popen(["bash", SCRIPT, *RUN], cwd=place, env=environment, start_new_session=True)


def test_every_node_starts_the_same_launch(place: Path) -> None:
    assert start(place).wait(timeout=30) == 0
    *_, torchrun = (place / "started").read_text().partition("torchrun\n")
    words = torchrun.splitlines()
    is_launch(["torchrun", *words])
    assert words[-len(RUN) :] == RUN
    assert {"--nnodes=2", "--rdzv_id=42", "--rdzv_endpoint=node7:29500", "--rdzv_backend=c10d"} <= set(words)
    assert not (place / "requeued").exists()


def test_a_failure_is_the_failure_of_the_job(place: Path) -> None:
    assert start(place, CODE="1").wait(timeout=30) == 1
    assert not (place / "requeued").exists()


def test_before_the_time_limit_it_saves_and_goes_back_into_the_queue(place: Path) -> None:
    job = start(place, HOLD="1")
    deadline = time.monotonic() + 30
    while not (place / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 0
    assert (place / "saved").exists()
    assert (place / "requeued").read_text() == "requeue 42\n"


def test_the_directives_go_together() -> None:
    text = SCRIPT.read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.M))
    assert asked["ntasks-per-node"] == "1"  # torchrun starts the ranks
    assert f"--nproc_per_node={asked['gpus-per-node']} " in text
    assert asked["signal"] == "B:TERM@300"  # to the script, which has the trap
    shutdown = re.search(r"--shutdown_timeout=(\d+)", text)
    assert shutdown
    assert int(shutdown[1]) < 300, "ranks need to be done before Slurm kills them"
    assert {"requeue", "open-mode"} <= set(asked)
