"""Ranks that die or hang, under torchrun."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import fasttrain.train.step
from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.events import ExitCode
from fasttrain.metrics.jsonl import read_metrics
from tests.faults.conftest import Row
from tests.faults.processes import Training, finished, last_step, launched, torchrun, wait_for
from tests.runs import command, curve, events, weights

ONCE = str(Path(__file__).with_name("once.py"))
TIMEOUT = 6  # seconds: parallel.timeout
OPTIONS = [
    *("--batch.steps", 12, "--checkpoint.every", 2, "--validation.every", 0, "--model.dropout", 0.2),
    *("--data.lint", "off", "--validation.sample", ""),
]

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks to which nothing happened."""
    run = tmp_path_factory.mktemp("ranks") / "whole"
    finished(run, *OPTIONS, world=2)
    return run


def assert_same(run: Path, whole: Path) -> None:
    metrics, expected = read_metrics(run), read_metrics(whole)
    for figure in ("step", "loss", "grad_norm"):
        assert curve(metrics, figure) == curve(expected, figure)
    torch.testing.assert_close(weights(run), weights(whole), rtol=0, atol=0)


def test_torchrun_starts_a_run_again_when_a_rank_dies(tmp_path: Path, whole: Path, row: Row) -> None:
    run = tmp_path / "run"
    argv = [*torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1"), ONCE, *command(run, *OPTIONS)]
    with launched(argv, FAULT="kill") as process:
        said = process.communicate(timeout=180)[0]
    assert process.returncode == 0, said[-2000:]
    (resumed,) = events(run, "resume")
    assert resumed["step"] in (4, 6)  # a save takes place in the background: the last may not have been published
    assert_same(run, whole)
    times = {line["step"]: line["time"] for line in read_metrics(run)}
    again = times[resumed["step"] + 1] - times[resumed["step"]]
    row(
        "a rank is killed under `torchrun --max-restarts`",
        happened=f"all ranks started again by themselves; the first step was {again:.1f} s after the last one before; "
        "bitwise the same result",
        lost=f"{7 - resumed['step']} steps, at a checkpoint every 2",
        reported="event `resume`; torchrun's exit code is 0",
    )


def hangs_once(marker: Path) -> None:
    """A fault: rank 1 hangs in Python, before step 8."""
    seed_step = fasttrain.train.step.seed_step

    def hang(seed: int, step: int, dp_rank: int) -> None:
        if (dp_rank, step) == (1, 7):
            marker.touch()
            time.sleep(600)
        seed_step(seed, step, dp_rank)

    fasttrain.train.step.seed_step = hang


def resumes_exactly(run: Path, whole: Path) -> int:
    """The same command ends as the undisturbed run did; the step that it resumed from."""
    saved = list_checkpoints(run / "checkpoints")[-1].step
    assert saved in (4, 6)
    finished(run, *OPTIONS, world=2)
    assert_same(run, whole)
    return saved


def test_a_rank_that_hangs_ends_the_others_and_is_named(tmp_path: Path, whole: Path, row: Row) -> None:
    run, marker = tmp_path / "run", tmp_path / "hangs"
    fault = partial(hangs_once, marker)
    with Training(run, *OPTIONS, "--parallel.timeout", TIMEOUT, fault=fault, world=2) as training:
        training.until(marker.exists, 120)
        begin = time.monotonic()
        codes = [training.ends(TIMEOUT + 30, rank) for rank in (0, 1)]
        seconds, said = time.monotonic() - begin, training.output()
    assert codes == [ExitCode.RANK_FAILURE, ExitCode.RANK_FAILURE], said
    assert TIMEOUT / 2 < seconds < TIMEOUT
    (lost,) = events(run, "rank failure")
    assert lost["text"].startswith("rank 1 hangs in hang (")
    assert "rank 1 hangs in hang (" in said
    saved = resumes_exactly(run, whole)
    row(
        "a rank hangs",
        happened=f"both had ended {seconds:.1f} s later (parallel.timeout {TIMEOUT}); the same command resumed, "
        "bit-for-bit",
        lost=f"{7 - saved} steps, at a checkpoint every 2",
        reported=f"event `rank failure`: rank 1 hangs in hang (file:line); exit code {ExitCode.RANK_FAILURE}",
    )


def test_torchrun_ends_when_a_rank_is_stopped(tmp_path: Path, whole: Path, row: Row) -> None:
    """torchrun itself would give the stopped rank 30 s after the others have ended."""
    run = tmp_path / "run"
    launcher = torchrun("--standalone", "--nproc-per-node=2")
    argv = [*launcher, ONCE, *command(run, *OPTIONS, "--parallel.timeout", TIMEOUT)]
    with launched(argv, FAULT="stop") as process:
        wait_for(lambda: last_step(run) >= 6, 120, lambda: process.poll() is None, lambda: "")
        ranks, begin = children(process.pid), time.monotonic()
        said = process.communicate(timeout=TIMEOUT + 60)[0]
        seconds = time.monotonic() - begin
    assert process.returncode != 0, said[-2000:]
    assert seconds < TIMEOUT
    assert not any(is_alive(rank) for rank in ranks)
    (lost,) = events(run, "rank failure")
    assert "rank 1" in lost["text"]
    assert "rank 1" in said
    saved = resumes_exactly(run, whole)
    row(
        "a rank gets SIGSTOP under torchrun",
        happened=f"it was killed, and all had ended {seconds:.1f} s later (parallel.timeout {TIMEOUT}); the same "
        "command resumed, bit-for-bit",
        lost=f"{7 - saved} steps, at a checkpoint every 2",
        reported=f"event `rank failure`: {lost['text']}; torchrun's exit code is {process.returncode}",
    )


def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path: Path, whole: Path, row: Row) -> None:
    run = tmp_path / "run"
    argv = [*torchrun("--standalone", "--nproc-per-node=2"), "-m", "fasttrain.train", *command(run, *OPTIONS)]
    with launched(argv) as process:
        wait_for(lambda: last_step(run) >= 5, 120, lambda: process.poll() is None, lambda: "")
        ranks = children(process.pid)
        process.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        wait_for(lambda: not any(is_alive(rank) for rank in ranks), 20, lambda: True, lambda: "ranks are alive")
        seconds = time.monotonic() - begin
    saved = list_checkpoints(run / "checkpoints")
    for checkpoint in saved:
        checkpoint.verify()
    finished(run, *OPTIONS, world=2)
    assert_same(run, whole)
    row(
        "torchrun itself is killed",
        happened=f"its {len(ranks)} ranks ended {seconds:.1f} s later; the same command resumed, bit-for-bit",
        lost="at most 2 checkpoint intervals",
        reported="event `resume`",
    )


def children(pid: int) -> list[int]:
    """Processes of our own torchrun."""
    return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
