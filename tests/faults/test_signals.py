"""SIGTERM, SIGINT and SIGUSR1, at any phase of a run."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fasttrain.checkpoint.saver
import fasttrain.train.loop
import fasttrain.train.messages
import fasttrain.train.setup
import fasttrain.train.step
from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.metrics.jsonl import read_metrics
from tests.faults.conftest import Row
from tests.faults.processes import Training, finished, last_step, launched, torchrun, wait_for
from tests.runs import command, curve, events

STEPS = 12
OPTIONS = [
    *("--batch.steps", STEPS, "--checkpoint.every", 5, "--validation.every", 4, "--data.lint", "off"),
    *("--validation.sample", ""),
]


def before(owner: Any, name: str, act: Any) -> None:
    """Call act(*args) before each call of a function."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def signalled(phase: str, number: int, marker: Path) -> None:
    """A fault: this process gets a signal in some phase, once."""

    def get(*_: Any) -> None:
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), number)

    def at_step(wanted: int, step: int) -> None:
        if step == wanted:
            get()

    loop, step_module = fasttrain.train.loop, fasttrain.train.step
    if phase == "while starting":
        before(fasttrain.train.setup, "training_data", get)
    elif phase == "before the first step":
        before(fasttrain.train.messages, "at_start", get)
    elif phase == "in a step":
        before(step_module, "seed_step", lambda seed, step, rank: at_step(6, step))
    elif phase == "in a validation":
        before(loop, "validate", get)
    elif phase == "in a save":
        before(fasttrain.checkpoint.saver, "write", get)
    elif phase == "in the last step":
        before(step_module, "seed_step", lambda seed, step, rank: at_step(STEPS - 1, step))
    elif phase == "in the last save":
        before(fasttrain.checkpoint.saver.Checkpoints, "save", lambda *_: at_step(STEPS, last_step(marker.parent)))
    elif phase == "after the last save":
        before(loop, "at_end", get)
    else:
        raise AssertionError(phase)


PHASES = {  # steps that may be saved
    "while starting": range(1),
    "before the first step": range(1, 3),
    "in a step": range(7, 10),
    "in a validation": range(4, 7),
    "in a save": range(6, 9),
    "in the last step": range(STEPS, STEPS + 1),
    "in the last save": range(STEPS, STEPS + 1),
    "after the last save": range(STEPS, STEPS + 1),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run that got no signal."""
    run = tmp_path_factory.mktemp("signals") / "whole"
    finished(run, *OPTIONS)
    return curve(read_metrics(run))


@pytest.mark.parametrize(
    "phase", [phase if phase == "in a step" else pytest.param(phase, marks=pytest.mark.faults) for phase in PHASES]
)
def test_sigterm_at_any_phase_loses_no_step(tmp_path: Path, whole: list[float], row: Row, phase: str) -> None:
    run = tmp_path / "run"
    with Training(run, *OPTIONS, fault=partial(signalled, phase, signal.SIGTERM, tmp_path / "sent")) as training:
        code, said = training.ends(), training.output()
    saved = [c.step for c in list_checkpoints(run / "checkpoints")] or [0]
    assert saved[-1] in PHASES[phase], said
    assert last_step(run) == saved[-1]  # of what was done, nothing is lost
    if phase == "while starting":
        assert code == -signal.SIGTERM
        reported = "the signal's own exit code"
    elif phase == "after the last save":
        assert code == 0, said  # the run is complete
        reported = "event `finish`, exit code 0"
    elif saved[-1] == STEPS:
        assert code in (0, 128 + signal.SIGTERM)
        reported = f"exit code {code}"
    else:
        assert code == 128 + signal.SIGTERM
        (event,) = events(run, "signal")
        assert event["step"] == saved[-1]
        assert "the same command resumes from here" in said
        reported = f"event `signal`, exit code {code}"
    finished(run, *OPTIONS)
    assert curve(read_metrics(run)) == whole
    row(
        f"SIGTERM {phase}",
        happened=f"{saved[-1]} of {STEPS} steps were done and saved; the same command resumed, bit-for-bit",
        lost="nothing",
        reported=reported,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_other_signals_save_too(tmp_path: Path, whole: list[float], row: Row, number: signal.Signals) -> None:
    run = tmp_path / "run"
    with Training(run, *OPTIONS, fault=partial(signalled, "in a step", number, tmp_path / "sent")) as training:
        assert training.ends() == 128 + number
    saved = list_checkpoints(run / "checkpoints")[-1].step
    assert last_step(run) == saved
    assert events(run, "signal")[0]["step"] == saved
    finished(run, *OPTIONS)
    assert curve(read_metrics(run)) == whole
    row(
        f"{number.name} in a step",
        happened=f"{saved} of {STEPS} steps were done and saved; the same command resumed, bit-for-bit",
        lost="nothing",
        reported=f"event `signal`, exit code {128 + number}",
    )


def hangs(where: str, marker: Path) -> None:
    """A fault: step 8 does not end, or the writing of a checkpoint."""

    def hang(*args: Any) -> None:
        if (where == "save" or args[1] == 7) and not marker.exists():
            marker.touch()
            time.sleep(60)

    if where == "step":
        before(fasttrain.train.step, "seed_step", hang)
    else:
        before(fasttrain.checkpoint.saver, "write", hang)


@pytest.mark.faults
@pytest.mark.parametrize("where", ["step", "save"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_second_signal_ends_it_at_once(
    tmp_path: Path, whole: list[float], row: Row, number: signal.Signals, where: str
) -> None:
    run, marker = tmp_path / "run", tmp_path / "hangs"
    with Training(run, *OPTIONS, fault=partial(hangs, where, marker)) as training:
        training.until(marker.exists)
        training.signal(number)
        time.sleep(0.5)
        assert training.is_running
        training.signal(number)
        begin = time.monotonic()
        code = training.ends(10)
        seconds = time.monotonic() - begin
    assert code == -number
    assert seconds < 5
    saved = [c.step for c in list_checkpoints(run / "checkpoints")]
    assert saved == ([5] if where == "step" else [])
    done = 7 if where == "step" else last_step(run)
    finished(run, *OPTIONS)
    assert curve(read_metrics(run)) == whole
    row(
        f"a second {number.name}, in a {where} that does not end",
        happened=f"ended {seconds:.1f} s later",
        lost=f"{done - max(saved, default=0)} steps since the last checkpoint, repeated bit-for-bit",
        reported="the signal's own exit code",
    )


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_passes_on_that_it_is_to_stop(tmp_path: Path, row: Row, number: signal.Signals) -> None:
    run = tmp_path / "run"
    endless = ["--batch.steps", 100_000, "--parallel.compile", "off", "--checkpoint.every", 0, "--validation.every", 0]
    argv = [*torchrun("--standalone", "--nproc-per-node=2"), "-m", "fasttrain.train", *command(run, *endless)]
    with launched(argv) as process:
        wait_for(lambda: last_step(run) >= 3, 120, lambda: process.poll() is None, lambda: "")
        begin = time.monotonic()
        process.send_signal(number)
        said = process.communicate(timeout=60)[0]
        seconds = time.monotonic() - begin
    assert process.returncode != 0, said  # torchrun's own
    saved = list_checkpoints(run / "checkpoints")[-1].step
    assert events(run, "signal")[0]["step"] == saved == last_step(run)
    row(
        f"{number.name} to torchrun with 2 ranks",
        happened=f"both saved step {saved} and ended, {seconds:.1f} s later",
        lost="nothing",
        reported=f"event `signal`; torchrun's exit code is {process.returncode}",
    )
