"""SIGKILL, which no process can see coming: at any moment, and again and again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.metrics.jsonl import read_metrics
from tests.faults.conftest import Row
from tests.faults.processes import Training, finished, last_step
from tests.runs import curve, events, weights

KILLS, STEPS = 50, 200
EVERY = 4  # steps between checkpoints
LONG = [
    *("--batch.steps", STEPS, "--checkpoint.every", EVERY, "--model.dropout", 0.2, "--data.lint", "off"),
    *("--validation.every", 0, "--log.every", 10),
]
SLOW_DISK = 0.02  # seconds of an fsync


def on_a_slow_disk() -> None:
    """A save takes long enough to be killed in."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(SLOW_DISK)
        fsync(descriptor)

    os.fsync = slow  # type: ignore[assignment]


def partial_directories(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob(".step-*.partial-*"))


def wait_for_a_moment(training: Training, before: int, dice: random.Random) -> None:
    """To be killed at; or until the run has ended, which on a loaded machine may be before its moment was seen."""

    def until(condition: Callable[[], object], pause: float = 0.005) -> None:
        training.until(lambda: condition() or not training.is_running, pause=pause)

    kind = dice.choice(["starting", "in a save", "in a save", "anywhere", "anywhere"])
    if kind == "starting":
        time.sleep(dice.uniform(0, 0.6))
    elif kind == "in a save":
        for _ in range(dice.randint(1, 3)):  # not always the first one
            until(lambda: not partial_directories(training.run), pause=0.001)
            until(lambda: partial_directories(training.run), pause=0.001)
        time.sleep(dice.uniform(0, 4 * SLOW_DISK))
    else:
        step = before + dice.randint(1, 12)
        until(lambda: last_step(training.run) >= step)
        time.sleep(dice.uniform(0, 0.05))


@dataclass(frozen=True)
class Round:
    """What became of one run that was killed again and again, and is bitwise the run without kills."""

    kills: int
    in_a_save: int
    lost: list[int]  # steps, by each kill
    resumed: int  # events


def kill_again_and_again(directory: Path, seed: int, *options: Any) -> Round:
    """Runs `killed` and `whole` of a directory; `whole` may be there already."""
    run, dice, asked = directory / "killed", random.Random(seed), [*LONG, *options]
    lost: list[int] = []
    in_a_save = 0
    for _ in range(KILLS):
        saved = list_checkpoints(run / "checkpoints")
        begun = saved[-1].step if saved else 0
        if begun > STEPS - 8 * EVERY:  # the run could be complete before the next kill
            break
        left = {*partial_directories(run)}  # of a kill before: a process that is killed as it starts deletes none
        with Training(run, *asked, fault=on_a_slow_disk) as training:
            wait_for_a_moment(training, begun, dice)
            with contextlib.suppress(ProcessLookupError):
                training.signal(signal.SIGKILL)
            if (code := training.ends()) == 0:
                break  # complete before the signal came, which is no kill
            assert code == -signal.SIGKILL, training.output()[-2000:]
        in_a_save += not left.issuperset(partial_directories(run))
        saved = list_checkpoints(run / "checkpoints")
        for checkpoint in saved:
            checkpoint.verify()
        newest = saved[-1].step if saved else 0
        assert newest >= begun
        lost.append(max(last_step(run) - newest, 0))
    finished(run, *asked)
    finished(directory / "whole", *asked)
    assert not partial_directories(run)
    assert max(lost) <= 2 * EVERY  # an interval, and what was trained while the last one was being written
    killed, whole = read_metrics(run), read_metrics(directory / "whole")
    assert curve(killed, "step") == list(range(1, STEPS + 1))
    for figure in ("loss", "grad_norm", "valid_tokens", "tokens"):
        assert curve(killed, figure) == curve(whole, figure)
    torch.testing.assert_close(weights(run), weights(directory / "whole"), rtol=0, atol=0)
    return Round(len(lost), in_a_save, lost, len(events(run, "resume")))


@pytest.mark.faults
def test_fifty_kills_lose_nothing_but_time(tmp_path: Path, row: Row) -> None:
    found = kill_again_and_again(tmp_path, seed=5)
    assert found.kills == KILLS
    assert found.in_a_save >= KILLS / 5
    row(
        "SIGKILL at random moments",
        happened=f"{KILLS} kills of one run, {found.in_a_save} of them in a save; every checkpoint valid after each; "
        "losses, gradient norms and all tensors at the end are bitwise those of a run without kills",
        lost=f"at most {max(found.lost)} steps at once, {sum(found.lost) / KILLS:.1f} on average, at a checkpoint "
        f"every {EVERY}",
        reported=f"{found.resumed} events `resume`, with the checkpoint",
    )


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, ["--optim.kind", "adamw", "--model.dropout", 0.2]),
        pytest.param(1, ["--optim.kind", "muon", "--data.document_mask", False], marks=pytest.mark.faults),
        pytest.param(2, ["--optim.kind", "muon", "--model.dropout", 0.2], marks=pytest.mark.faults),
    ],
)
def test_a_killed_run_resumes_bit_for_bit_as_if_it_had_not_been(tmp_path: Path, world: int, options: list[Any]) -> None:
    long = [*options, "--batch.steps", 24, "--checkpoint.every", 2, "--validation.every", 0, "--data.lint", "off"]
    run, whole = tmp_path / "killed", tmp_path / "at once"
    with Training(run, *long, world=world) as training:
        training.until_step(5)
        for rank in range(world):
            training.signal(signal.SIGKILL, rank)
        assert training.ends() == -signal.SIGKILL
    steps = [c.step for c in list_checkpoints(run / "checkpoints")]
    assert steps
    assert steps[-1] < 24
    finished(run, *long, world=world)
    finished(whole, *long, world=world)
    assert events(run, "resume")[0]["step"] == steps[-1]
    assert curve(read_metrics(run), "step") == list(range(1, 25))
    for figure in ("loss", "grad_norm"):
        assert curve(read_metrics(run), figure) == curve(read_metrics(whole), figure)
    torch.testing.assert_close(weights(run), weights(whole), rtol=0, atol=0)
