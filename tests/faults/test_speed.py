"""What becomes slow: a loader, and one rank of two. The part and the rank are named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fasttrain.train.state import TrainState
from tests.faults.conftest import Row
from tests.faults.processes import Training
from tests.runs import events

SLOW = 80  # steps before it begins
WITHIN = 50  # steps to the report
OPTIONS = [
    *("--model.layers", 1, "--batch.steps", SLOW + WITHIN + 10, "--checkpoint.every", 0, "--validation.every", 0),
    *("--batch.micro", 4, "--data.lint", "off", "--validation.sample", "", "--log.every", 100),
]

pytestmark = pytest.mark.faults


def slow_loader() -> None:
    """A fault: from a step on, reading a batch takes 0.3 s longer, on the last rank."""
    read = TrainState.micro_batches
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1

    def slow(run: TrainState, step: int) -> Any:
        if step >= SLOW and run.runtime.rank == last:
            time.sleep(0.3)
        return read(run, step)

    TrainState.micro_batches = slow  # type: ignore[assignment]


@pytest.mark.parametrize("world", [1, 2])
def test_a_slow_loader_is_named(tmp_path: Path, row: Row, world: int) -> None:
    run = tmp_path / "run"
    with Training(run, *OPTIONS, fault=slow_loader, world=world) as training:
        for rank in range(world):
            assert training.ends(240, rank) == 0, training.output()
        said = training.output()
    slow = [event for event in events(run, "slow-down") if event["step"] > SLOW]
    first = slow[0]
    assert first["step"] <= SLOW + WITHIN
    evidence = first["evidence"]
    assert (evidence["phase"], evidence["rank"]) == ("data", world - 1)
    assert f"data of rank {world - 1}" in first["text"]
    assert first["text"] in " ".join(said.split())
    row(
        "the loader becomes slow" + ", on one rank of two" * (world > 1),
        happened=f"steps took {evidence['seconds'] / evidence['usual']:.1f} times as long; found after "
        f"{first['step'] - SLOW} steps",
        lost="nothing",
        reported=f"event `slow-down`: data of rank {world - 1}",
    )


def test_a_slow_rank_is_named(tmp_path: Path, row: Row) -> None:
    """Rank 1 gets a tenth of its processor: it is stopped nine tenths of the time."""
    run = tmp_path / "run"
    with Training(run, *OPTIONS, world=2) as training:
        training.until_step(SLOW, 120)
        deadline = time.monotonic() + 120
        while all(process.is_alive() for process in training.ranks) and not told(run):
            assert time.monotonic() < deadline, training.output()[-2000:]
            for number, seconds in ((signal.SIGSTOP, 0.045), (signal.SIGCONT, 0.005)):
                training.signal(number, rank=1)
                time.sleep(seconds)
        training.signal(signal.SIGTERM, rank=0)
        for rank in (0, 1):
            training.ends(60, rank)
    first = told(run)[0]
    evidence = first["evidence"]
    assert first["step"] <= SLOW + WITHIN + 2
    assert evidence["rank"] == 1, first
    assert "of rank 1" in first["text"]
    row(
        "one rank of two becomes slow",
        happened=f"it got a tenth of its processor; steps took {evidence['seconds'] / evidence['usual']:.1f} times as "
        f"long; found after {first['step'] - SLOW} steps",
        lost="nothing",
        reported=f"event `slow-down`: {evidence['phase']} of rank 1",
    )


def told(run: Path) -> list[dict[str, Any]]:
    return [event for event in events(run, "slow-down") if event["step"] > SLOW]
