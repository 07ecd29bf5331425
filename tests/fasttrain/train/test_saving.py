"""Saves that fail: tried again, told at every step, and no state is given up. Also: ranks that die or hang."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

import fasttrain.checkpoint.saver
import fasttrain.checkpoint.writer
import fasttrain.train.control
import fasttrain.train.loop
import fasttrain.train.setup
import fasttrain.train.step
from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.cli import main as commands
from fasttrain.events import ExitCode
from fasttrain.fs import HashedFile
from fasttrain.metrics.jsonl import read_events, read_metrics
from fasttrain.model import Block
from fasttrain.monitor.mfu import MfuMonitor
from fasttrain.train import main
from tests.ranks import run_ranks

SMALL = [
    *("--model.layers", "3", "--model.hidden", "32", "--model.heads", "4", "--model.kv_heads", "2"),
    *("--model.head_dim", "8", "--model.ffn", "48", "--data.sequence", "32", "--batch.sequences", "4"),
    *("--batch.micro", "2", "--batch.steps", "30", "--optim.warmup", "2", "--checkpoint.every", "5"),
    *("--validation.every", "0", "--validation.sequences", "4", "--validation.sample", ""),
    *("--log.tensorboard", "False"),
]


def train(run: Path, *options: Any) -> int:
    return main([*SMALL, "--out", str(run), *map(str, options)])


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["kind"] == kind]


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run / "checkpoints")]


def failing(times: float, rank: int = 0) -> Any:
    """The first saves fail, on one rank, as it opens its file."""
    attempts = set()

    class Failing(HashedFile):
        def __init__(self, path: Path) -> None:
            if dist.get_rank() == rank:
                attempts.add(path.parent)
                if len(attempts) <= times:
                    raise OSError(errno.EIO, "Input/output error")
            super().__init__(path)

    return patch.object(fasttrain.checkpoint.writer, "HashedFile", Failing)


def quick_pauses() -> Any:
    return patch.multiple(fasttrain.train.control, PAUSE=0.05, LONGEST_PAUSE=0.1)


def test_a_failed_save_is_tried_again_and_the_age_of_the_last_one_shows(tmp_path, capsys):
    with failing(2):
        assert train(tmp_path) == 0
    told = events(tmp_path, "failed save")
    assert told[0]["step"] == 5
    assert len(told) == 2
    assert "Input/output error" in told[0]["text"]
    assert told[0]["action"] == "retries"
    assert 6 <= told[1]["step"] <= 10  # within a few steps
    ages = {line["step"]: line["unsaved_steps"] for line in read_metrics(tmp_path)}
    assert ages[5] == 5
    assert max(ages.values()) <= 15
    assert ages[30] <= 10  # the save of step 25 may still be under way
    assert all(line["checkpoint_age"] >= 0 for line in read_metrics(tmp_path))
    warned = re.findall(r"step (\d+): warning: step \d+ is not saved: .*Input/output error", capsys.readouterr().out)
    assert warned
    assert steps(tmp_path)[-1] == 30


def test_a_failed_save_is_noticed_within_a_step(tmp_path):
    """Without a background, in the very step."""
    with failing(1):
        assert train(tmp_path, "--checkpoint.background", False) == 0
    assert events(tmp_path, "failed save")[0]["step"] == 5
    times = {line["step"]: line["time"] for line in read_metrics(tmp_path)}
    assert events(tmp_path, "failed save")[0]["time"] <= times[6]


@pytest.mark.parametrize("background", [True, False])
def test_when_saves_keep_failing_the_run_is_held_until_one_succeeds(tmp_path, capsys, background):
    with failing(6), quick_pauses():
        assert train(tmp_path, "--checkpoint.retries", 2, "--checkpoint.background", background) == 0
    (pause,) = events(tmp_path, "pause")
    (over,) = events(tmp_path, "pause over")
    assert pause["step"] == over["step"]
    assert len(events(tmp_path, "failed save")) == 3  # the first, and two more
    assert "paused" in capsys.readouterr().out
    assert pause["step"] in steps(tmp_path) or steps(tmp_path)[0] >= 5
    with quick_pauses():
        assert train(tmp_path / "whole") == 0
    held, whole = ([line["loss"] for line in read_metrics(run)] for run in (tmp_path, tmp_path / "whole"))
    assert held == whole


def test_or_the_run_ends_and_says_so_in_its_exit_code(tmp_path, capsys):
    with failing(99):
        assert train(tmp_path, "--checkpoint.retries", 1, "--checkpoint.on_save_failure", "stop") == ExitCode.NOT_SAVED
    (end,) = events(tmp_path, "not saved")
    assert end["step"] < 30
    assert "is not saved" in end["text"]
    assert "Input/output error" in end["text"]
    assert not steps(tmp_path)


def test_the_last_save_of_a_run_counts_as_well(tmp_path):
    options = ["--checkpoint.every", 0, "--batch.steps", 4]
    with failing(99):
        assert train(tmp_path / "stopped", *options, "--checkpoint.on_save_failure", "stop") == ExitCode.NOT_SAVED
    with failing(2), quick_pauses():
        assert train(tmp_path / "held", *options) == 0
    assert steps(tmp_path / "held") == [4]
    assert events(tmp_path / "held", "finish")


def test_a_signal_ends_a_run_that_is_held(tmp_path):
    def ask() -> None:
        deadline = time.monotonic() + 30
        while not events(tmp_path, "pause") and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    asking = threading.Thread(target=ask)
    asking.start()
    with failing(999), quick_pauses():
        assert (
            train(tmp_path, "--checkpoint.retries", 0) == ExitCode.NOT_SAVED
        )  # not saved counts more than why it ended
    asking.join()
    assert events(tmp_path, "not saved")


def train_on_two(run: Path, change: Callable[[], Any], *options: Any) -> None:
    with change(), quick_pauses():
        assert train(run, *options) == 0


def fails_on_the_second() -> Any:
    return failing(4, rank=1)


def test_ranks_try_again_together(tmp_path):
    run_ranks(train_on_two, 2, tmp_path, fails_on_the_second, "--checkpoint.retries", 1)
    assert "rank 1: OSError" in events(tmp_path, "failed save")[0]["text"]
    assert len(events(tmp_path, "pause")) == 1
    assert steps(tmp_path)[-1] == 30


def test_room_is_made_before_a_save_and_a_full_disk_is_no_surprise(tmp_path):
    run, keep = tmp_path / "run", ["--checkpoint.keep_last", 3, "--checkpoint.keep_best", False]
    assert train(run, *keep, "--batch.steps", 15) == 0
    size = list_checkpoints(run / "checkpoints")[-1].bytes
    disk = 64 * 2**20 + int(3.5 * size)  # has no room for a fourth one, not even for a moment

    def free(*_: object) -> int:
        return disk - sum(file.stat().st_size for file in (run / "checkpoints").rglob("*") if file.is_file())

    late = patch.object(
        fasttrain.train.setup, "check_disk_space", lambda *_: None
    )  # others fill the disk after the start
    with late, patch("fasttrain.checkpoint.disk_space.free_bytes", free):
        assert train(run, *keep, "--batch.steps", 20) == 0
        assert steps(run) == [10, 15, 20]
        (pruned,) = events(run, "pruned")
        assert "step-00000005" in pruned["text"]
        disk -= 2 * size
        code = train(run, *keep, "--batch.steps", 25, "--checkpoint.on_save_failure", "stop", "--checkpoint.retries", 0)
    assert code == ExitCode.NOT_SAVED
    assert "no disk space for the checkpoint" in events(run, "failed save")[-1]["text"]
    assert steps(run) == [10, 15, 20]  # nothing is deleted in vain


def lost(run: Path) -> None:
    seed_step = fasttrain.train.step.seed_step

    def hang(seed: int, step: int, rank: int) -> None:
        if (step, rank) == (7, 1):
            time.sleep(12)
        seed_step(seed, step, rank)

    with patch.object(fasttrain.train.step, "seed_step", hang):
        os._exit(train(run, "--parallel.timeout", 4))


def test_a_rank_that_hangs_is_named_and_all_end(tmp_path):
    with pytest.raises(ProcessExitedException, match=f"exit code {ExitCode.RANK_FAILURE}"):
        run_ranks(lost, 2, tmp_path)
    (event,) = events(tmp_path, "rank failure")
    assert event["text"].startswith("rank 1 hangs in hang (")
    assert event["step"] == 7
    assert event["time"] - read_metrics(tmp_path)[-1]["time"] < 4
    assert train(tmp_path) == 0
    assert events(tmp_path, "resume")[0]["evidence"]["lost_steps"] <= 5


def test_a_block_that_gets_no_gradient_is_reported(tmp_path):
    forward = Block.forward

    def cut(block: Block, *args: Any) -> Any:
        if not getattr(block, "cut", False):
            return forward(block, *args)
        with torch.no_grad():
            made = forward(block, *args)
        return tuple(x + (y - x).detach() for x, y in zip(args[:2], made, strict=True))

    make = fasttrain.train.setup._model

    def model(*args: Any, **kwargs: Any) -> Any:
        decoder = make(*args, **kwargs)
        decoder.blocks[1].cut = True  # type: ignore[assignment]
        return decoder

    with patch.object(Block, "forward", cut), patch.object(fasttrain.train.setup, "_model", model):
        assert train(tmp_path, "--batch.steps", 55) == 0
    norms = {line["step"]: [line[f"block_norm/{block:02}"] for block in range(3)] for line in read_metrics(tmp_path)}
    assert all(norm > 0 for norm in (norms[1][0], norms[1][2]))
    assert [event["evidence"]["block"] for event in events(tmp_path, "dead block")] == [1]


def test_block_norms_and_the_rest_make_the_norm(tmp_path):
    assert train(tmp_path, "--batch.steps", 3) == 0
    line = read_metrics(tmp_path)[0]
    blocks = sum(line[f"block_norm/{block:02}"] ** 2 for block in range(3)) ** 0.5
    assert 0 < blocks < line["grad_norm"]


def test_a_low_mfu_is_explained_once(tmp_path, capsys):
    with (
        patch.object(MfuMonitor, "FIRST", 2),
        patch.object(MfuMonitor, "STEPS", 5),
        patch("fasttrain.train.setup.peak_flops", lambda *_: 1e15),
    ):
        assert train(tmp_path, "--batch.steps", 20) == 0
    (event,) = events(tmp_path, "low MFU")
    assert event["step"] == 7
    assert event["evidence"]["causes"]
    assert "the MFU is low, because of:" in capsys.readouterr().out


# Weights that are not finite


def poisoned(at: int) -> Any:
    """After so many steps a weight is NaN, as no setting within its bounds makes it."""
    own = fasttrain.train.step.train_step

    def step(state: Any, *arguments: Any) -> Any:
        result = own(state, *arguments)
        if state.progress.step >= at:
            with torch.no_grad():
                dict(state.model.named_parameters())["blocks.1.down.weight"][0, 0] = float("nan")
        return result

    return patch.object(fasttrain.train.loop, "train_step", step)


@pytest.mark.parametrize("spike", ["warn", "skip"])
def test_a_model_that_is_not_finite_is_never_saved_and_the_run_does_not_wait_for_it(tmp_path, capsys, spike):
    with poisoned(at=12), quick_pauses():
        assert train(tmp_path / "run", "--monitor.spike", spike) == ExitCode.NOT_SAVED
    assert steps(tmp_path / "run") == [5, 10]
    (event,) = events(tmp_path / "run", "not saved")
    assert "model.blocks.1.down.weight has values that are not finite; resume from the last checkpoint" in event["text"]
    assert not events(tmp_path / "run", "pause")


def test_a_checkpoint_that_is_not_finite_is_not_verified_and_not_exported(tmp_path, capsys):
    run = tmp_path / "run"
    with poisoned(at=12), patch.object(fasttrain.checkpoint.saver, "not_finite", lambda state: []):
        assert train(run, "--monitor.spike", "warn", "--batch.steps", 15) == ExitCode.STOPPED
    capsys.readouterr()
    assert commands(["checkpoint", "verify", str(run)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "15" in said
    assert "model.blocks.1.down.weight of" in said
    assert "2 valid, 1 corrupt" in said
    with pytest.raises(SystemExit, match="2"):
        commands(["export", str(run), "--out", str(tmp_path / "exported")])
    assert "model.blocks.1.down.weight of" in (said := capsys.readouterr().err)
    assert "has values that are not finite; use another" in said
    assert not (tmp_path / "exported").exists()
