"""Two runs in one directory: the second one is refused, and the first one does not notice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.metrics.jsonl import read_metrics
from tests.faults.conftest import Row
from tests.faults.processes import Training, finished
from tests.runs import curve, events

OPTIONS = [
    *("--batch.steps", 40, "--checkpoint.every", 4, "--validation.every", 0, "--validation.sample", ""),
    *("--data.lint", "off"),
]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_a_second_run_in_a_directory_is_refused(tmp_path: Path, row: Row, world: int) -> None:
    run, second = tmp_path / "run", "--optim.lr=1"
    with Training(run, *OPTIONS) as first:
        first.until_step(2)
        before = (run / "config.toml").read_bytes()
        begin = time.monotonic()
        with Training(run, *OPTIONS, second, world=world) as other:
            codes = [other.ends(60, rank) for rank in range(world)]
            seconds = time.monotonic() - begin
            said = other.output()
        assert codes[0] == 2, said
        assert all(codes)
        assert f"another process is training in {run}; wait for it, or choose another --out" in said
        assert first.is_running
        assert (run / "config.toml").read_bytes() == before
        assert first.ends() == 0
    finished(tmp_path / "alone", *OPTIONS)
    assert curve(read_metrics(run)) == curve(read_metrics(tmp_path / "alone"))
    assert [len(events(run, kind)) for kind in ("start", "resume", "changed setting")] == [1, 0, 0]
    steps = [[c.step for c in list_checkpoints(r / "checkpoints")] for r in (run, tmp_path / "alone")]
    assert steps[0] == steps[1]
    row(
        f"a second run in the same directory{' (2 ranks)' * (world > 1)}",
        happened=f"refused after {seconds:.1f} s, before it wrote anything; the first continued, bit-for-bit",
        lost="nothing",
        reported="which directory; exit code 2",
    )
