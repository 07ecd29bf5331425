"""Disks that are full, fail, or become read-only. A failed save is told, retried, and never costs an older one."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fasttrain.checkpoint.saver
import fasttrain.train.control
from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.checkpoint.saver import Checkpoints
from fasttrain.events import ExitCode
from fasttrain.metrics.jsonl import read_metrics
from tests.faults.conftest import Row
from tests.faults.namespaces import Shell, small_disk
from tests.faults.processes import Training, finished, last_step
from tests.runs import curve, events, weights

STEPS, EVERY, BAD = 20, 4, 8  # the save after step BAD meets the fault
OPTIONS = [
    *(
        "--batch.steps",
        STEPS,
        "--checkpoint.every",
        EVERY,
        "--checkpoint.keep_last",
        2,
        "--checkpoint.keep_best",
        False,
    ),
    *("--checkpoint.retries", 1, "--validation.every", 0, "--validation.sample", "", "--data.lint", "off"),
]
MEGABYTES = 96  # of the disk: 64 are never used, and a checkpoint has 2
LEFT = 300_000  # bytes: too few for a checkpoint, enough for metrics

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def whole_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A run to which nothing happened."""
    runs: dict[int, Path] = {}

    def whole(world: int = 1) -> Path:
        if world not in runs:
            runs[world] = tmp_path_factory.mktemp("disk") / "whole"
            finished(runs[world], *OPTIONS, world=world)
        return runs[world]

    return whole


def assert_same(run: Path, whole: Path) -> None:
    metrics, expected = read_metrics(run), read_metrics(whole)
    for figure in ("step", "loss", "grad_norm"):
        assert curve(metrics, figure) == curve(expected, figure)
    torch.testing.assert_close(weights(run), weights(whole), rtol=0, atol=0)


def assert_valid(run: Path) -> list[int]:
    """The steps of all checkpoints, each read whole; nothing half written lies beside them."""
    checkpoints = list_checkpoints(run / "checkpoints")
    for checkpoint in checkpoints:
        checkpoint.verify()
    assert not list((run / "checkpoints").glob(".step-*.partial-*"))
    return [checkpoint.step for checkpoint in checkpoints]


def fill(directory: Path, left: int) -> None:
    """A file takes all of the disk but so many bytes."""
    status = os.statvfs(directory)
    with open(directory / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - left)


def impatient() -> None:
    """A paused run retries soon."""
    fasttrain.train.control.PAUSE = fasttrain.train.control.LONGEST_PAUSE = 0.3


def filled_while_writing() -> None:
    """A fault: there was room for the checkpoint, and while it is written there is none any more."""
    write = fasttrain.checkpoint.saver.write  # type: ignore[attr-defined]

    def meets_others(state: Any, directory: Path, group: Any) -> Any:
        if f"step-{BAD:08}" in directory.name:
            fill(directory.parent, LEFT)
        return write(state, directory, group)

    fasttrain.checkpoint.saver.write = meets_others  # type: ignore[attr-defined]
    impatient()


def filled_before_saving(step: int) -> None:
    """A fault: half a checkpoint more would have room, if an old one went."""
    free_space = Checkpoints._free_space

    def meets_others(checkpoints: Checkpoints, state: dict[str, torch.Tensor], number: int) -> tuple[str, ...]:
        if number == step:
            fill(checkpoints._directory, 64 * 2**20 + sum(t.numel() * t.element_size() for t in state.values()) // 2)
        return free_space(checkpoints, state, number)

    Checkpoints._free_space = meets_others  # type: ignore[assignment]
    impatient()


@contextmanager
def disk_of(run: Path) -> Iterator[tuple[Path, Shell]]:
    """The run, as every process sees it, with a small disk for its checkpoints alone."""
    run.mkdir()
    with small_disk(run / "checkpoints", MEGABYTES) as (path, shell):
        yield path.parent, shell


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_fills_up_during_a_save(
    tmp_path: Path, whole_on: Callable[[int], Path], row: Row, background: bool
) -> None:
    options = [*OPTIONS, "--checkpoint.background", background]
    with disk_of(tmp_path / "run") as (run, _):
        with Training(run, *options, fault=filled_while_writing) as training:
            (pause,) = training.until(lambda: events(run, "pause"))
            assert assert_valid(run) == [EVERY]
            done = last_step(run)
            (run / "checkpoints" / "filler").unlink()
            assert training.ends() == 0
            said = training.output()
        failed = events(run, "failed save")
        assert failed[0]["step"] == BAD
        assert "No space left on device" in failed[0]["text"]
        assert f"warning: step {BAD} is not saved" in " ".join(said.split())
        (over,) = events(run, "pause over")
        assert over["step"] == pause["step"]
        unsaved = max(curve(read_metrics(run), "unsaved_steps"))
        assert assert_valid(run)[-1] == STEPS
        assert_same(run, whole_on(1))
    row(
        f"the disk fills up during a save{'' if background else ' that training waits for'}",
        happened=f"the save of step {BAD} failed, {len(failed)} in all, and the run was held after step {done}; with "
        "room again it continued, bit-for-bit",
        lost="nothing; the older checkpoint stayed",
        reported="events `failed save`, `pause`, `pause over`; a warning at each step; `unsaved_steps` rose to "
        f"{unsaved:.0f}",
    )


def test_a_full_disk_may_end_the_run_instead(tmp_path: Path, whole_on: Callable[[int], Path], row: Row) -> None:
    """Here all of the run is on that disk, metrics and events too."""
    with small_disk(tmp_path / "disk", MEGABYTES) as (path, _):
        run = path / "run"
        with Training(run, *OPTIONS, "--checkpoint.on_save_failure", "stop", fault=filled_while_writing) as training:
            assert training.ends() == ExitCode.NOT_SAVED
            said = training.output()
        assert "No space left on device" in " ".join(said.split())  # lines are as long as a terminal's
        (end,) = events(run, "not saved")
        assert assert_valid(run) == [EVERY]
        (run / "checkpoints" / "filler").unlink()
        finished(run, *OPTIONS)
        assert_same(run, whole_on(1))
    row(
        "the same, with checkpoint.on_save_failure = stop",
        happened=f"the run ended after step {end['step']}; with room again the same command resumed, bit-for-bit",
        lost=f"{end['step'] - EVERY} steps, at a checkpoint every {EVERY}; the older checkpoint stayed",
        reported=f"events `failed save` and `not saved`; exit code {ExitCode.NOT_SAVED}",
    )


def test_old_checkpoints_make_room_for_new_ones(tmp_path: Path, whole_on: Callable[[int], Path], row: Row) -> None:
    with disk_of(tmp_path / "run") as (run, _):
        finished(run, *OPTIONS, fault=partial(filled_before_saving, 16))
        pruned = events(run, "pruned")
        assert "step-00000008" in pruned[0]["text"]
        assert assert_valid(run)[-1] == STEPS
        assert not events(run, "failed save")
        assert_same(run, whole_on(1))
    row(
        "no disk space before a save, but for an old checkpoint that would go after it",
        happened="it went first; the save succeeded",
        lost="nothing",
        reported=f"event `pruned` ({len(pruned)})",
    )


def fails_to_sync(rank: int, times: int) -> None:
    """A fault: the disk of one rank loses what is written to it."""
    fsync = os.fsync
    failures: list[str] = []

    def broken(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".distcp") and len(failures) < times and os.environ.get("RANK", "0") == str(rank):
            failures.append(path)
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    os.fsync = broken  # type: ignore[assignment]
    impatient()


@pytest.mark.parametrize("background", [True, False])
def test_an_error_of_the_disk_on_one_rank_fails_the_save_on_all(
    tmp_path: Path, whole_on: Callable[[int], Path], row: Row, background: bool
) -> None:
    run = tmp_path / "run"
    options = [*OPTIONS, "--checkpoint.background", background]
    said = finished(run, *options, fault=partial(fails_to_sync, 1, 1), world=2)
    (failed,) = events(run, "failed save")
    assert "rank 1: OSError: [Errno 5] Input/output error" in failed["text"]
    assert failed["text"] in " ".join(said.split())
    assert assert_valid(run)[-1] == STEPS
    assert_same(run, whole_on(2))
    saved = next(line["step"] for line in read_metrics(run) if line["unsaved_steps"] < line["step"])
    row(
        f"EIO on one rank of two{'' if background else ', in a save that training waits for'}",
        happened=f"the save of step {failed['step']} failed on both; another one was there by step {saved}; bitwise "
        "the same result",
        lost="nothing",
        reported=f"event `failed save`: {failed['text'].partition(': ')[2]}",
    )


def test_a_directory_that_becomes_read_only(tmp_path: Path, whole_on: Callable[[int], Path], row: Row) -> None:
    with disk_of(tmp_path / "run") as (run, shell):
        place = tmp_path / "run" / "checkpoints"
        options = [*OPTIONS, "--batch.steps", 400, "--optim.schedule", "constant"]
        with Training(run, *options, fault=impatient) as training:
            training.until(lambda: list_checkpoints(run / "checkpoints"))
            # While a file is open for writing, it is busy.
            training.until(lambda: "failed" not in shell.run(f"mount -o remount,ro '{place}'"))
            before = assert_valid(run)
            (pause,) = training.until(lambda: events(run, "pause"))
            assert assert_valid(run) == before
            done = last_step(run)
            shell.must(f"mount -o remount,rw '{place}'")
            training.until(lambda: events(run, "pause over"))
            training.until(lambda: list_checkpoints(run / "checkpoints")[-1].step >= done)
            training.signal(signal.SIGTERM)
            assert training.ends() == 128 + signal.SIGTERM
        failed = events(run, "failed save")
        assert "Read-only file system" in failed[0]["text"]
        assert assert_valid(run)[-1] == last_step(run)
    row(
        "the directory becomes read-only",
        happened=f"{len(failed)} saves failed, and the run was held after step {pause['step']}; writable again, it "
        "went on",
        lost="nothing; the older checkpoints stayed",
        reported="events `failed save`, `pause`, `pause over`",
    )


def test_a_signal_while_the_run_is_held(tmp_path: Path, whole_on: Callable[[int], Path], row: Row) -> None:
    run = tmp_path / "run"
    with Training(run, *OPTIONS, fault=partial(fails_to_sync, 0, 10**6)) as training:
        training.until(lambda: events(run, "pause"))
        training.signal(signal.SIGTERM)
        assert training.ends(20) == ExitCode.NOT_SAVED
        said = training.output()
    (end,) = events(run, "not saved")
    assert end["text"] in " ".join(said.split())
    assert assert_valid(run) == []
    finished(run, *OPTIONS)
    assert_same(run, whole_on(1))
    row(
        "SIGTERM while paused",
        happened=f"ended after step {end['step']}, none of which could be saved",
        lost=f"{end['step']} steps: all since the last checkpoint",
        reported=f"event `not saved`; exit code {ExitCode.NOT_SAVED}",
    )
