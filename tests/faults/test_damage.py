"""Checkpoints that are no longer what was written: named, never loaded, and the newest valid one is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.metrics.jsonl import read_metrics
from fasttrain.train import main
from tests.faults.conftest import Row
from tests.runs import command, curve, events, train, weights

OPTIONS = [
    *("--checkpoint.every", 2, "--validation.every", 0, "--validation.sample", "", "--data.lint", "off"),
    *("--batch.micro", 8),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps, with checkpoints of steps 2, 4 and 6."""
    run = tmp_path_factory.mktemp("damage") / "whole"
    train(run, *OPTIONS)
    return run


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])  # checkpoint.json ends with a newline


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def missing(path: Path) -> None:
    path.unlink()


DAMAGES = [
    ("__0_0.distcp", truncated, "is truncated, or still being copied: it has"),
    ("__0_0.distcp", flipped, "is corrupt: its sha256 is"),
    ("__0_0.distcp", missing, "is missing"),
    (".metadata", truncated, "is truncated, or still being copied: it has"),
    (".metadata", flipped, "is corrupt: its sha256 is"),
    (".metadata", missing, "is missing"),
    ("checkpoint.json", truncated, "is corrupt"),
    ("checkpoint.json", flipped, "is corrupt"),
    ("checkpoint.json", emptied, "is corrupt"),
    ("checkpoint.json", missing, "has no checkpoint.json"),
]


def test_a_corrupt_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, whole: Path, capfd: pytest.CaptureFixture[str], row: Row
) -> None:
    for name, damage, said in DAMAGES:
        run = tmp_path / f"{damage.__name__} {name}"
        shutil.copytree(whole, run)
        damage(run / "checkpoints" / "step-00000006" / name)
        assert main(command(run, *OPTIONS)) == 0
        (corrupt,) = events(run, "corrupt checkpoint")
        assert "step-00000006" in corrupt["text"]
        assert name in corrupt["text"]
        assert said in corrupt["text"]
        assert corrupt["text"] in " ".join(capfd.readouterr().out.split())
        (resumed,) = events(run, "resume")
        assert "step-00000004" in resumed["text"]
        assert_same(run, whole)
    row(
        "a checkpoint file is truncated, bit-flipped or missing",
        happened=f"{len(DAMAGES)} damages, of every kind of file; the next start used the checkpoint before",
        lost="1 checkpoint interval, repeated bit-for-bit",
        reported="event `corrupt checkpoint`: the file and what is wrong with it; `resume` names the one used",
    )


def test_two_corrupt_checkpoints_are_both_named(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    flipped(run / "checkpoints" / "step-00000006" / "__0_0.distcp")
    truncated(run / "checkpoints" / "step-00000004" / "checkpoint.json")
    assert main(command(run, *OPTIONS)) == 0
    first, second = (event["text"] for event in events(run, "corrupt checkpoint"))
    assert "step-00000006/__0_0.distcp is corrupt" in first
    assert "step-00000004/checkpoint.json is corrupt" in second
    assert "step-00000002" in events(run, "resume")[0]["text"]
    assert_same(run, whole)


@pytest.mark.parametrize("name", ["__0_0.distcp", "checkpoint.json"])
def test_without_a_sound_checkpoint_nothing_starts_and_nothing_is_deleted(
    tmp_path: Path, whole: Path, capfd: pytest.CaptureFixture[str], row: Row, name: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for file in run.glob(f"checkpoints/*/{name}"):
        emptied(file)
    before = sorted(run.rglob("*"))
    for resume, message in (("auto", "is valid ("), ("never", "holds a run")):
        with pytest.raises(SystemExit) as exit:
            main(command(run, *OPTIONS, "--resume", resume))
        assert exit.value.code == 2
        said = capfd.readouterr().err
        assert message in said
        assert said.count(name) == (3 if resume == "auto" else 0)
        assert sorted(run.rglob("*")) == before
    if name == "checkpoint.json":
        row(
            "every checkpoint is corrupt",
            happened="the run does not start, and does not begin anew over what is left",
            lost="nothing more",
            reported="every corrupt file; exit code 2",
        )


def assert_same(run: Path, whole: Path) -> None:
    metrics, expected = read_metrics(run), read_metrics(whole)
    assert curve(metrics, "step") == [1, 2, 3, 4, 5, 6]
    assert curve(metrics) == curve(expected)
    assert curve(metrics, "grad_norm") == curve(expected, "grad_norm")
    torch.testing.assert_close(weights(run), weights(whole), rtol=0, atol=0)
    assert [c.step for c in list_checkpoints(run / "checkpoints")][-1] == 6
