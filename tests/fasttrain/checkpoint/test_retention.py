"""Retention: which checkpoints stay, and how the others go."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain import config
from fasttrain.checkpoint.committed import Checkpoint, find, list_checkpoints
from fasttrain.checkpoint.retention import clear_leftovers, delete, expendable, quarantine


def checkpoint(step: int, loss: float | None = None, name: str | None = None) -> Checkpoint:
    path = Path(name or f"step-{step:08}")
    return Checkpoint(path=path, step=step, loss=loss, optimizer="AdamW", scaler={}, metadata={}, files=())


def write(directory: Path, step: int, name: str | None = None) -> Checkpoint:
    path = directory / (name or f"step-{step:08}")
    path.mkdir()
    checkpoint(step, name=str(path)).write()
    return Checkpoint.read(path)


def kept(checkpoints: list[Checkpoint], **rules: object) -> list[int]:
    gone = expendable(checkpoints, config.CheckpointConfig(**{"keep_best": False, **rules}))  # type: ignore[arg-type]
    return [c.step for c in checkpoints if c not in gone]


def test_rules_add_up() -> None:
    losses = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: math.nan, 60: 1.5}
    saved = [checkpoint(step, loss) for step, loss in losses.items()]
    assert kept(saved, keep_last=2) == [50, 60]
    assert kept(saved, keep_last=9) == list(losses)
    assert kept(saved, keep_last=1, keep_best=True) == [20, 60]
    assert kept(saved, keep_last=1, keep_every=20) == [20, 40, 60]
    assert kept(saved[:1], keep_last=1) == [10]
    assert kept(saved[2:3], keep_last=1, keep_best=True) == [30]


def test_of_a_step_saved_again_only_the_last_stays() -> None:
    first, again = checkpoint(10), checkpoint(10, name="step-00000010-2")
    assert expendable([first, again], config.CheckpointConfig(keep_last=9, keep_every=1)) == [first]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    every=st.integers(1, 7),
    losses=st.lists(st.none() | st.floats(), max_size=20),
    keep_last=st.integers(1, 5),
    keep_best=st.booleans(),
    keep_every=st.integers(0, 12),
)
def test_a_run_keeps_at_every_moment_what_its_rules_say(
    every: int, losses: list[float | None], keep_last: int, keep_best: bool, keep_every: int
) -> None:
    """One save after the other, each followed by pruning: no later rule misses what an earlier pruning took."""
    rules = config.CheckpointConfig(keep_last=keep_last, keep_best=keep_best, keep_every=keep_every)
    present: list[Checkpoint] = []
    for number, loss in enumerate(losses, 1):
        present.append(checkpoint(number * every, loss))
        gone = expendable(present, rules)
        present = [c for c in present if c not in gone]
        steps = [c.step for c in present]
        ever = {n * every: x for n, x in enumerate(losses[:number], 1)}
        expected = {*list(ever)[-keep_last:]}
        expected |= {step for step in ever if keep_every and step % keep_every == 0}
        finite = {step: x for step, x in ever.items() if x is not None and math.isfinite(x)}
        if keep_best and finite:
            expected.add(max(step for step, x in finite.items() if x == min(finite.values())))
        assert steps == sorted(expected)


def test_what_is_deleted_first_loses_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 5).path
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)  # a kill after the rename
    delete(path)
    monkeypatch.undo()
    assert list_checkpoints(tmp_path) == []
    (hidden,) = tmp_path.iterdir()
    with pytest.raises(ValueError, match="was never finished, or is being deleted"):
        Checkpoint.read(hidden)
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_only_what_a_saver_left(tmp_path: Path) -> None:
    (tmp_path / ".step-00000005.partial-0a1b2c3d").mkdir()
    (tmp_path / ".step-00000005.partial-0a1b2c3d" / "__0_0.distcp").touch()
    (tmp_path / ".step-00000006-2.deleted-0a1b2c3d").mkdir()
    others = [write(tmp_path, 7).path, tmp_path / ".mine", tmp_path / "quarantined-step-00000008", tmp_path / "partial"]
    for path in others[1:]:
        path.mkdir()
    clear_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_quarantine_takes_checkpoints_out_of_the_run_and_keeps_them(tmp_path: Path) -> None:
    stays, *later = (write(tmp_path, step) for step in (1, 2, 3))
    quarantine(later, None)
    assert list_checkpoints(tmp_path) == [stays]
    aside = sorted(path for path in tmp_path.iterdir() if path != stays.path)
    assert [path.name[:25] for path in aside] == ["quarantined-step-00000002", "quarantined-step-00000003"]
    assert [find(path).step for path in aside] == [2, 3]
