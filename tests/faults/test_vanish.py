"""Files that vanish under a live run: its data, its tokenizer, its own directory."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import fasttrain.data.stream
from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.data.corpus import standard_library
from fasttrain.events import ExitCode
from fasttrain.metrics.jsonl import read_events, read_metrics
from tests.faults.conftest import Row
from tests.faults.processes import Training, finished
from tests.runs import curve, events, weights

STEPS = 60
OPTIONS = [
    *("--batch.steps", STEPS, "--checkpoint.every", 20, "--validation.every", 10, "--validation.sequences", 4),
    *("--data.lint", "off", "--log.report", False),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A dataset of this test's own."""
    return Path(shutil.copytree(standard_library(), tmp_path / "data"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A run to which nothing happened."""
    runs: dict[int, Path] = {}

    def of(world: int) -> Path:
        if world not in runs:
            runs[world] = tmp_path_factory.mktemp("vanish") / "whole"
            finished(runs[world], *OPTIONS, world=world)
        return runs[world]

    return of


def same(run: Path, other: Path, steps: int = STEPS) -> bool:
    one, two = (curve(read_metrics(path)) for path in (run, other))
    return len(one) == steps and one == two[:steps]


def truncate(data: Path, split: str) -> None:
    for shard in data.glob(f"{split}*.tokens"):
        os.truncate(shard, 4096)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.faults)])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_truncated_dataset_ends_a_run_which_saves(
    tmp_path: Path, data: Path, whole: Callable[[int], Path], row: Row, split: str, world: int
) -> None:
    run, options = tmp_path / "run", [*OPTIONS, "--data.path", data]
    with Training(run, *options, world=world) as training:
        training.until_step(3)
        truncate(data, split)
        codes = [training.ends(60, rank) for rank in range(world)]
        said = training.output()
    assert codes == [ExitCode.LOST_FILES] * world, said
    assert "Traceback" not in said
    (event,) = events(run, "lost files")
    assert f"{data}/{split}-00000.tokens is truncated: it has 4096 bytes" in event["text"]
    assert "once the file is back, the same command resumes" in event["text"]
    done = len(read_metrics(run))
    assert list_checkpoints(run / "checkpoints")[-1].step == event["step"] == done
    shutil.copytree(standard_library(), data, dirs_exist_ok=True)
    finished(run, *options, world=world)
    assert same(run, whole(world))
    assert weights(run).keys() == weights(whole(world)).keys()
    assert all(
        (weights(run)[key] == value).all() for key, value in weights(whole(world)).items() if hasattr(value, "all")
    )
    row(
        f"{split} data truncated under a run, {world} ranks",
        happened="saved and exited; resumed bit-for-bit",
        lost="nothing",
        reported="`lost files`, the file; 6",
    )


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_deleted_dataset_or_tokenizer_does_no_harm(
    tmp_path: Path, data: Path, whole: Callable[[int], Path], row: Row, name: str
) -> None:
    run = tmp_path / "run"
    with Training(run, *OPTIONS, "--data.path", data) as training:
        training.until_step(3)
        shutil.rmtree(data) if not name else (data / name).unlink()
        assert training.ends() == 0, training.output()
    assert same(run, whole(1))
    assert len(events(run, "sample")) == STEPS // 10
    row(f"{name or 'dataset'} deleted", happened="trained on, from open files", lost="nothing", reported="nothing")


def stale(rank: int) -> None:
    """From the 200th read on, files are stale on one rank."""
    real, reads = os.pread, []

    def pread(*arguments: int) -> bytes:
        reads.append(1)
        if len(reads) > 200 and os.environ.get("RANK", "0") == str(rank):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*arguments)

    fasttrain.data.stream.os.pread = pread  # type: ignore[attr-defined]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_a_stale_handle_on_one_rank_ends_all_of_them_saved(
    tmp_path: Path, whole: Callable[[int], Path], row: Row, world: int
) -> None:
    run = tmp_path / "run"
    with Training(run, *OPTIONS, fault=partial(stale, world - 1), world=world) as training:
        codes = [training.ends(60, rank) for rank in range(world)]
        said = training.output()
    assert codes == [ExitCode.LOST_FILES] * world, said
    (event,) = events(run, "lost files")
    assert "Stale file handle" in event["text"]
    assert "00000.tokens" in event["text"]
    finished(run, *OPTIONS, world=world)
    assert same(run, whole(world))
    row(f"ESTALE on one rank of {world}", happened="saved and exited", lost="nothing", reported="`lost files`; 6")


def test_a_run_without_any_place_says_that_it_is_not_saved(tmp_path: Path, row: Row) -> None:
    run = tmp_path / "disk" / "run"
    run.parent.mkdir()
    with Training(run, *OPTIONS) as training:
        training.until_step(3)
        run.parent.rename(tmp_path / "away")
        run.parent.write_text("no directory")
        code = training.ends()
    said = (tmp_path / "away" / "run.output").read_text()
    assert code == ExitCode.NOT_SAVED, said
    assert "Traceback" not in said
    assert "of which the last is not saved: rank 0: NotADirectoryError" in said
    assert f"it ended because {run} was deleted, moved or replaced" in said
    row(
        "the disk of the run gone", happened="exited", lost="steps since the last checkpoint", reported="`not saved`; 4"
    )


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.faults)])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_run_whose_directory_is_gone_saves_beside_it(
    tmp_path: Path, whole: Callable[[int], Path], row: Row, how: str, world: int
) -> None:
    run, rescued = tmp_path / "run", tmp_path / "run-rescued"
    with Training(run, *OPTIONS, world=world) as training:
        training.until_step(3)
        run.rename(tmp_path / "away")
        if how == "replaced":
            run.mkdir()
            (run / "mine").write_text("another run")
        codes = [training.ends(60, rank) for rank in range(world)]
        said = training.output()
    assert codes == [ExitCode.LOST_FILES] * world, said
    assert "Traceback" not in said
    assert [path.name for path in run.glob("*")] == ["mine"] * (how == "replaced")
    ends = [line for line in read_events(rescued) if line["kind"] == "lost files"]
    assert f"{run} was deleted, moved or replaced" in ends[0]["text"]
    assert f"--out {rescued} resumes" in ends[0]["text"]
    assert "finished" not in said
    finished(rescued, *OPTIONS, world=world)
    assert list_checkpoints(rescued / "checkpoints")[-1].step == STEPS
    ours = read_metrics(rescued)
    assert curve(ours) == curve(read_metrics(whole(world)))[-len(ours) :]
    row(
        f"run directory {how}, {world} ranks",
        happened="saved beside it and exited; resumed bit-for-bit",
        lost="its metrics and older checkpoints",
        reported="`lost files`, both directories; 6",
    )
