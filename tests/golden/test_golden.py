"""A refactoring leaves the golden runs as they were: bit-for-bit where a recording has this machine's key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.runs import RECORDED, RUNS, golden, key

TOLERANCE = 1e-3  # relative, of losses on other machines: rounding differs, and grows with the steps
COMPARED = 20  # first steps that are compared there


@pytest.mark.parametrize("name", RUNS)
def test_a_golden_run_is_as_it_was_recorded(tmp_path: Path, name: str) -> None:
    run, recording = golden(name, tmp_path), RECORDED / f"{key()}.json"
    if recording.exists():
        recorded = json.loads(recording.read_text())[name]
        for part in recorded:
            assert run[part] == recorded[part], f"{name}: {part} changed"
        return
    recorded = json.loads(min(RECORDED.glob("*.json")).read_text())[name]
    assert run["exit code"] == recorded["exit code"]
    assert run["events"] == recorded["events"]
    assert _losses(run) == pytest.approx(_losses(recorded), rel=TOLERANCE)


def test_the_comparison_sees_one_bit() -> None:
    recorded = json.loads(min(RECORDED.glob("*.json")).read_text())
    assert set(recorded) == set(RUNS)
    for run in recorded.values():
        losses = [float.fromhex(loss) for _, loss, _ in run["steps"]]
        assert len(losses) >= 40
        assert losses[0] > 3.5 > losses[-1]  # it learns: a constant would equal itself


def _losses(run: dict[str, Any]) -> list[float]:
    return [float.fromhex(loss) for _, loss, _ in run["steps"][:COMPARED]]
