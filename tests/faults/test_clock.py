"""A clock that jumps back by a day, in a run and between two processes of it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

import fasttrain.train.step
from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.metrics.jsonl import read_validations
from tests.faults.conftest import Row
from tests.runs import curve, events, train, weights

DAY = 86_400.0
OPTIONS = [
    *("--checkpoint.every", 3, "--checkpoint.keep_last", 2, "--checkpoint.keep_best", False, "--data.lint", "off"),
    *("--validation.every", 3, "--batch.micro", 8, "--optim.schedule", "constant", "--validation.sample", ""),
]


def clock(days: float, from_step: int) -> ExitStack:
    """The clock is some days behind, from a step on."""
    now, seed, late = time.time, fasttrain.train.step.seed_step, [0.0]

    def seed_step(_: int, step: int, rank: int) -> None:
        if step == from_step:
            late[0] = days * DAY
        seed(_, step, rank)

    stack = ExitStack()
    stack.enter_context(patch.object(fasttrain.train.step, "seed_step", seed_step))
    stack.enter_context(patch.object(time, "time", lambda: now() - late[0]))
    return stack


def test_a_clock_that_jumps_back_changes_nothing(tmp_path: Path, row: Row) -> None:
    run = tmp_path / "run"
    train(run, *OPTIONS, "--batch.steps", 8)
    with clock(1, from_step=12):  # in the run
        train(run, *OPTIONS, "--batch.steps", 16)
    with clock(2, from_step=16):  # and when it is resumed
        metrics = train(run, *OPTIONS, "--batch.steps", 24)
    times = curve(metrics, "time")
    assert [n for n in range(1, 24) if times[n] < times[n - 1] - DAY / 2] == [12, 16]
    assert curve(metrics, "step") == list(range(1, 25))
    assert curve(read_validations(run), "step") == [3, 6, 8, 9, 12, 15, 16, 18, 21, 24]
    assert [event["step"] for event in events(run, "resume")] == [8, 16]
    assert [c.step for c in list_checkpoints(run / "checkpoints")] == [21, 24]
    assert min(curve(metrics, "step_seconds")) > 0
    ages = [line.get("checkpoint_age", 0.0) for line in metrics]
    assert min(ages) >= 0
    assert max(ages) < DAY / 2
    assert curve(metrics) == curve(train(tmp_path / "whole", *OPTIONS, "--batch.steps", 24))
    torch.testing.assert_close(weights(run), weights(tmp_path / "whole"), rtol=0, atol=0)
    row(
        "the clock jumps back by a day",
        happened="in a run, and again before it is resumed; order, retention and resume of checkpoints, and reading of "
        "metrics, are by step; bitwise the same result",
        lost="nothing",
        reported="as the clock says",
    )
