"""The loop enters the logger once a step, whatever happens in it; and nothing that the logger says decides anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from fasttrain.events import Event, EventKind
from fasttrain.metrics.logger import RunLogger
from fasttrain.metrics.record import Note, StepRecord, ValidationRecord
from tests.runs import train


def test_a_step_with_validation_and_save_enters_the_logger_once(tmp_path: Path) -> None:
    entries: list[list[Any]] = []
    write = RunLogger.write

    def noted(logger: RunLogger, news: Any) -> None:
        entries.append(list(news))
        assert write(logger, entries[-1]) is None  # nothing for the loop to branch on

    with patch.object(RunLogger, "write", noted):
        train(tmp_path, "--checkpoint.background", False)
    start, *steps, after, end = entries  # six steps, of which the third and the last validate and save
    assert len(steps) == 6
    assert any(isinstance(item, Event) and item.kind == EventKind.START for item in start)
    assert isinstance(end[0], Event)
    assert end[0].kind == EventKind.FINISH
    assert after == []  # what had become of the last save was told in its step
    kinds = [[type(item) for item in news] for news in steps]
    assert kinds[0] == []  # the host does not wait for the first step
    assert kinds[1] == [StepRecord]
    for news in (kinds[2], kinds[5]):
        assert news[:2] == [StepRecord, StepRecord]  # the step before, and this one, which validation waits for
        assert {ValidationRecord, Event, Note} <= set(news)
    for news in (steps[2], steps[5]):
        assert [item.saved for item in news if isinstance(item, Note)].count(True) == 1


def test_without_the_logger_a_run_decides_the_same(tmp_path: Path) -> None:
    heard = train(tmp_path / "heard")
    with patch.object(RunLogger, "write", lambda logger, news: None):
        train(tmp_path / "silent")
    checkpoints = [
        sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("heard", "silent")
    ]
    assert checkpoints[0] == checkpoints[1]
    assert len(heard) == 6
