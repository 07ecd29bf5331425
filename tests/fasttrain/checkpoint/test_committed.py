"""Published checkpoints: what is read, what is damage, and which one is meant."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.checkpoint.committed import (
    NAME,
    Checkpoint,
    committed_paths,
    directory_name,
    find,
    list_checkpoints,
    newest_valid,
)
from fasttrain.fs import HashedFile
from tests.fasttrain.checkpoint.subject import NO_TENSORS

FACTS = {"seed": 3, "tokens": 2**60 + 1, "loss": 0.1 + 0.2, "nan": float("inf"), "name": "ä", "none": None}
FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata")


def make(directory: Path, step: int, *, loss: float | None = None, name: str | None = None) -> Checkpoint:
    path = directory / (name or directory_name(step, committed_paths(directory)))
    path.mkdir(parents=True)
    records = []
    for number, file_name in enumerate(FILES):
        with HashedFile(path / file_name) as file:
            content = bytes(range(256)) * (number + step % 100 + 1)
            file.write(NO_TENSORS if file_name == ".metadata" else content)
        records.append(file.checksum())
    checkpoint = Checkpoint(
        path=path, step=step, loss=loss, optimizer="AdamW", scaler={}, metadata=FACTS, files=tuple(records)
    )
    checkpoint.write()
    return checkpoint


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def test_reading_gives_what_was_written(tmp_path: Path) -> None:
    written = make(tmp_path, 7, loss=1 / 3)
    read = Checkpoint.read(written.path)
    assert read == written
    assert read.bytes == sum(os.stat(read.path / name).st_size for name in FILES)
    read.verify()


def test_the_command_of_the_documentation_finds_damage(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    (command,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    path = make(tmp_path, 7).path

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "-c", command], cwd=path, capture_output=True, text=True)

    assert run().returncode == 0
    assert all(f"{name}: OK" in run().stdout for name in FILES)
    flip(path / FILES[0], 100)
    assert run().returncode != 0
    assert f"{FILES[0]}: FAILED" in run().stdout


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit": (lambda path: flip(path / FILES[1], 300, 5), r"__1_0.distcp is corrupt: its sha256 is \w{12}\.\.\. instead"),
    "truncated": (
        lambda path: os.truncate(path / FILES[0], 200),
        r"__0_0.distcp is truncated, or still being copied: it has 200 bytes inst",
    ),
    "longer": (lambda path: os.truncate(path / FILES[0], 9999), r"__0_0.distcp is too long: it has 9999 bytes instead"),
    "missing": (lambda path: (path / ".metadata").unlink(), r"\.metadata is missing"),
    "two": (
        lambda path: [os.truncate(path / name, 0) for name in FILES[:2]],
        r"__0_0.* truncated.*; .*__1_0.* truncat",
    ),
    "json missing": (lambda path: (path / NAME).unlink(), r"has no checkpoint.json, so it is not a checkpoint"),
    "json cut": (lambda path: os.truncate(path / NAME, 100), r"checkpoint.json is corrupt \("),
    "json empty": (lambda path: os.truncate(path / NAME, 0), r"checkpoint.json is corrupt \("),
    "json metadata": (
        lambda path: (path / NAME).write_text((path / NAME).read_text().replace('"seed": 3', '"seed": 2')),
        r"checkpoint.json is corrupt: its content does not have the sha256 that it states",
    ),
    "version": (
        lambda path: (path / NAME).write_text((path / NAME).read_text().replace('"version": 1', '"version": 2')),
        r"has version 2, this fasttrain reads version 1; use the fasttrain that wrote it",
    ),
    "foreign": (lambda path: (path / NAME).write_text("[]"), r'does not say "format": "fasttrain checkpoint"'),
    "renamed": (lambda path: _swap(path), r"step-00000009 holds step 7; give it its name back"),
}


def _swap(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.parent / "step-00000007", path)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_is_used(tmp_path: Path, kind: str) -> None:
    older, newer = make(tmp_path, 7), make(tmp_path, 9)
    reports: list[str] = []
    assert newest_valid(tmp_path, None, reports.append) == newer
    assert reports == []
    damage, message = DAMAGES[kind]
    damage(newer.path)
    assert newest_valid(tmp_path, None, reports.append) == older
    assert len(reports) == 1
    assert re.search(message, reports[0]), reports
    with pytest.raises(ValueError, match=message):
        Checkpoint.read(newer.path).verify()


def test_without_a_sound_checkpoint_there_is_none(tmp_path: Path) -> None:
    reports: list[str] = []
    assert newest_valid(tmp_path / "absent", None, reports.append) is None
    for step in (1, 2):
        (make(tmp_path, step).path / ".metadata").unlink()
    assert newest_valid(tmp_path, None, reports.append) is None
    assert len(reports) == 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_of_checkpoint_json_changes_what_is_read(tmp_path_factory, share: float, bit: int) -> None:
    checkpoint = make(tmp_path_factory.mktemp("run"), 7)
    path = checkpoint.path / NAME
    flip(path, int(share * path.stat().st_size), bit)
    try:
        read = Checkpoint.read(checkpoint.path)
    except ValueError:
        return
    assert read == checkpoint  # a space may have become another one


def test_listing_shows_finished_checkpoints_by_step(tmp_path: Path) -> None:
    for step in (100_000_000, 20, 3):
        make(tmp_path, step)
    again = make(tmp_path, 20)
    assert again.path.name == "step-00000020-2"
    make(tmp_path, 4, name=".step-00000004.partial-0a")
    make(tmp_path, 5, name=".step-00000005.deleted-0a")
    make(tmp_path, 6, name="quarantined-step-00000006-0a")
    (tmp_path / "step-x").mkdir()
    (make(tmp_path, 7).path / NAME).unlink()
    assert [c.step for c in list_checkpoints(tmp_path)] == [3, 20, 20, 100_000_000]
    assert [c.path for c in list_checkpoints(tmp_path)][2] == again.path
    assert len(committed_paths(tmp_path)) == 5
    assert list_checkpoints(tmp_path / "absent") == []


def test_find_takes_a_run_a_step_of_it_or_a_directory(tmp_path: Path) -> None:
    run = tmp_path / "run@home"
    first, second = (make(run / "checkpoints", step) for step in (200, 1000))
    again = make(run / "checkpoints", 200)
    aside = make(run / "checkpoints", 300, name="quarantined-step-00000300-0a")
    assert find(run) == find(str(run)) == find(f"{run}@1000") == find(run / "checkpoints") == second
    assert find(f"{run}@200") == find(f"{run}@00200") == again
    assert find(first.path) == first
    assert find(aside.path) == aside


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("absent", FileNotFoundError, r"absent does not exist; name a run, RUN@STEP, or the directory of a checkpoint"),
        ("absent@3", FileNotFoundError, r"absent does not exist"),
        ("run@300", ValueError, r"run has none of step '300'; it has 200, 1000"),
        ("run@last", ValueError, r"run has none of step 'last'; it has 200, 1000"),
        ("run@", ValueError, r"run has none of step ''; it has 200, 1000"),
        ("empty", ValueError, r"there is none in .*empty; is .*empty the directory of a run\?"),
        ("run/checkpoints/.step-00000004.partial-0a", ValueError, r"was never finished, or is being deleted"),
        ("run/checkpoints/step-00000200", ValueError, r"has no checkpoint.json, so it is not a checkpoint"),
        ("file", FileNotFoundError, r"file is not a directory"),
    ],
)
def test_find_says_what_there_is(tmp_path: Path, name: str, error: type[Exception], message: str) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    (make(checkpoints, 200).path / NAME).unlink()
    make(checkpoints, 1000)
    make(checkpoints, 4, name=".step-00000004.partial-0a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(error, match=message):
        find(tmp_path / name)
