"""Numbers that go wrong: a loss that is not finite on one rank, and data that makes a spike."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import fasttrain.train.setup
from fasttrain.data.cursor import DataCursor
from fasttrain.data.segments import read_segments
from fasttrain.metrics.jsonl import read_metrics
from fasttrain.train.state import Progress
from tests.fasttrain.train.test_rollback import poisoned, train, train_with_nan
from tests.faults.conftest import Row
from tests.ranks import run_ranks
from tests.runs import curve, events, weights

pytestmark = pytest.mark.faults  # the same, in parts, is quick in test_recovery.py


def test_a_loss_that_is_not_finite_on_one_rank_of_two_never_reaches_the_weights(tmp_path: Path, row: Row) -> None:
    run_ranks(train_with_nan, 2, tmp_path, [12], 2)
    (event,) = events(tmp_path, "not finite")
    assert event["step"] == 13
    assert "skipped this optimizer update" in event["text"]
    losses = curve(read_metrics(tmp_path))
    assert math.isnan(losses[12])
    assert len(losses) == 30
    assert all(math.isfinite(loss) for step, loss in enumerate(losses) if step != 12)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(tmp_path).values())
    row(
        "the loss of one rank of two is NaN",
        happened="in one step; every rank skipped its update, and continued with finite weights",
        lost="the update of that step",
        reported=f"event `not finite`, step {event['step']}",
    )


def test_a_poisoned_stretch_of_data_is_left_out(tmp_path: Path, row: Row) -> None:
    run = tmp_path / "run"
    with poisoned(range(70, 75)):
        assert train(run) == 0
    (spike,) = events(run, "spike")
    (back,) = events(run, "rollback")
    assert 72 <= spike["step"] <= 77
    assert "bad data: the batch of step" in back["text"]
    assert back["documents"]
    skips = read_segments(run)[-1].cursor.skips
    with patch.object(fasttrain.train.setup, "Progress", partial(Progress, cursor=DataCursor(skips=skips))):
        assert train(tmp_path / "without") == 0
    assert curve(read_metrics(run)) == curve(read_metrics(tmp_path / "without"))
    torch.testing.assert_close(weights(run), weights(tmp_path / "without"), rtol=0, atol=0)
    row(
        "5 steps of poisoned data make a spike",
        happened=f"found {spike['step'] - 71} steps after the first of them; back to the last good checkpoint and past "
        f"{skips[0].steps} batches; from there bitwise a run that never had them",
        lost=f"{spike['step'] + 1 - 60} steps, at a checkpoint every 20",
        reported="events `spike` and `rollback`: bad data, the step, and the documents",
    )
