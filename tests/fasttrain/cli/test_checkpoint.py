"""fasttrain checkpoint list, verify and prune: what they show, what they delete, and their exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fasttrain import cli
from fasttrain.checkpoint.committed import Checkpoint, list_checkpoints
from fasttrain.checkpoint.saver import Checkpoints
from fasttrain.fs import HashedFile, exclusive_lock
from fasttrain.rundir import RunDir
from tests.fasttrain.checkpoint.subject import KEEP_ALL, NO_TENSORS, Subject, gloo


def save(run: Path, step: int, loss: float | None = None, again: int = 1) -> Path:
    """A checkpoint with a file of 2,000 bytes, and metadata of 150."""
    path = run / "checkpoints" / (f"step-{step:08}" + (f"-{again}" if again > 1 else ""))
    path.mkdir(parents=True)
    with HashedFile(path / "weights") as file:
        file.write(bytes([step % 256]) * 2000)
    with HashedFile(path / ".metadata") as described:
        described.write(NO_TENSORS)
    metadata, files = {"world_size": 4}, (file.checksum(), described.checksum())
    Checkpoint(path=path, step=step, loss=loss, optimizer="AdamW", scaler={}, metadata=metadata, files=files).write()
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(autouse=True)
def only_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """These checkpoints have files, and no tensors in them: test_saving.py looks at weights."""
    monkeypatch.setattr("fasttrain.checkpoint.state.verify_weights", lambda checkpoint: None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for step, loss in {100: 3.5, 200: 2.5, 300: None, 400: 2.75, 500: None}.items():
        save(run, step, loss)
    return run


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield gloo()
    dist.destroy_process_group()


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run / "checkpoints")]


def call(*words: object) -> int:
    """The exit code, however the command ends."""
    try:
        return cli.main(["checkpoint", *map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)


def test_list_shows_step_loss_size_and_which_is_best(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list", run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["100", "200", "300", "400", "500"]
    assert "2.5000" in lines[2]
    assert "2.2 kB" in lines[2]
    assert lines[2].rstrip().endswith("4      best")
    assert lines[5].rstrip().endswith("newest")
    assert "5 in" in lines[-1]
    assert "10.8 kB" in lines[-1]


def test_list_names_what_cannot_be_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "checkpoints/step-00000300/checkpoint.json")
    assert call("list", run) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "step-00000300" in printed
    assert "corrupt: " in printed


def test_verify_says_that_all_are_valid(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", run) == 0
    assert "5 valid, 0 corrupt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (flip, "is corrupt: its sha256 is"),
        (lambda path: os.truncate(path, 100), "is truncated, or still being copied: it has 100 bytes instead of 2000"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_verify_names_the_file_and_what_is_wrong(run: Path, capsys: pytest.CaptureFixture[str], harm, what) -> None:
    file = run / "checkpoints/step-00000200/weights"
    harm(file)
    assert call("verify", run) == 1
    printed = capsys.readouterr().out
    joined = "".join(printed.split())  # long paths are folded
    assert "".join(f"corrupt: {file} {what}".split()) in joined
    assert "4 valid, 1 corrupt" in printed
    assert call("verify", f"{run}@200") == 1
    assert call("verify", file.parent) == 1
    assert call("verify", f"{run}@300") == 0


def test_verify_of_a_step_saved_again_is_of_the_last(run: Path) -> None:
    save(run, 500, again=2)
    flip(run / "checkpoints/step-00000500/weights")
    assert call("verify", f"{run}@500") == 0
    assert call("verify", run) == 1


def test_verify_reads_what_the_trainer_saves(tmp_path: Path, group: dist.ProcessGroup) -> None:
    with Checkpoints(tmp_path / "run/checkpoints", KEEP_ALL, group=group) as saver:
        path = Subject(steps=1).saved(saver).path
    assert call("verify", tmp_path / "run") == 0
    flip(path / "__0_0.distcp")
    assert call("verify", tmp_path / "run") == 1


def test_prune_keeps_the_newest_and_the_best(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("prune", run, "--keep", 2, "--dry-run") == 0
    assert "3 stay, 2 would go: 4.3 kB" in capsys.readouterr().out
    assert steps(run) == [100, 200, 300, 400, 500]
    assert call("prune", run, "--keep", 2) == 0
    assert "3 stay, 2 deleted: 4.3 kB" in capsys.readouterr().out
    assert steps(run) == [200, 400, 500]


def test_prune_counts_valid_ones_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (200, 400, 500):
        flip(run / f"checkpoints/step-{step:08}/weights")
    assert call("prune", run, "--keep", 1) == 1
    assert "step-00000500 is corrupt and stays" in capsys.readouterr().err
    assert steps(run) == [100, 200, 300, 400, 500]  # 100 is the best of the valid ones, 300 the newest


def test_prune_never_deletes_the_only_valid_one(run: Path) -> None:
    for step in (200, 300, 400, 500):
        (run / f"checkpoints/step-{step:08}/weights").unlink()
    assert call("prune", run, "--keep", 1) == 1
    assert call("verify", f"{run}@100") == 0


def test_prune_leaves_a_run_that_trains_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with exclusive_lock(RunDir(run).lock, "taken"):
        assert call("prune", run, "--keep", 1) == 2
    assert "another process is training in" in capsys.readouterr().err
    assert len(steps(run)) == 5


def test_prune_tells_what_it_cannot_delete(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr("fasttrain.checkpoint.retention.delete", refuse)
    assert call("prune", run, "--keep", 4) == 1
    printed = capsys.readouterr()
    assert "could not be deleted: Operation not permitted" in printed.err
    assert "could not be deleted" in printed.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["list", "RUN/nothing"], "does not exist; name a run"),
        (["prune", "RUN/checkpoints", "--keep", "1"], "is not the directory of a run"),
        (["verify", "RUN@7"], "has none of step '7'; it has 100, 200, 300, 400, 500"),
        (["verify", "RUN/checkpoints/step-00000007"], "does not exist; name a run, RUN@STEP"),
        (["prune", "RUN"], "--keep"),
        (["prune", "RUN", "--keep", "0"], "--keep: '0' must be a whole number from 1 to 1_000_000"),
    ],
)
def test_mistakes(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str) -> None:
    assert call(*(word.replace("RUN", str(run)) for word in words)) == 2
    assert error in capsys.readouterr().err
