"""Ranks that died, hang or were stopped: the others name them, and all have ended when the time-out is over."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fasttrain.config import ParallelConfig
from fasttrain.distributed.hang_detector import HangDetector, RankFailure, reserve
from fasttrain.distributed.runtime import start
from fasttrain.events import ExitCode
from tests.ranks import free_port

TIMEOUT = 6  # seconds
HARMED = 2


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hangs() -> None:
    time.sleep(60)


def waits_for_a_thread() -> None:
    threading.Event().wait(60)  # a loader that delivers nothing


def rank(number: int, world: int, port: int, harm: Any, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with start(ParallelConfig(device="cpu", timeout=TIMEOUT)) as runtime:
        try:
            with runtime.hang_detector.naming_failed_ranks():
                for step in range(1000):
                    if (number, step) == (HARMED, 10):
                        (out / "harmed").touch()
                        harm()
                    dist.all_gather([torch.empty(10_000) for _ in range(world)], torch.ones(10_000))
        except RankFailure as lost:
            (out / str(number)).write_text(str(lost))
            os._exit(ExitCode.RANK_FAILURE)


@pytest.mark.parametrize(
    ("harm", "said", "code"),
    [
        (dies, "rank 2 died or does not answer", -signal.SIGKILL),
        (is_stopped, "rank 2 died or does not answer", -signal.SIGKILL),
        (hangs, f"rank 2 hangs in hangs ({__file__}:", ExitCode.RANK_FAILURE),
        (waits_for_a_thread, f"rank 2 hangs in wait ({threading.__file__}:", ExitCode.RANK_FAILURE),
    ],
)
def test_the_lost_rank_is_named_by_all_and_all_end_within_the_time_out(tmp_path, harm, said, code):
    world, context, port = 4, mp.get_context("forkserver"), free_port()
    context.set_forkserver_preload([__name__, "torch.distributed"])
    ranks = [context.Process(target=rank, args=(n, world, port, harm, tmp_path), daemon=True) for n in range(world)]
    for process in ranks:
        process.start()
    try:
        while not (tmp_path / "harmed").exists():
            assert all(process.is_alive() for process in ranks)
            time.sleep(0.01)
        begin = time.monotonic()
        for process in ranks:
            process.join(TIMEOUT + 5)
        seconds = time.monotonic() - begin
    finally:
        for process in ranks:
            process.kill()
    assert seconds < TIMEOUT
    assert ranks[HARMED].exitcode == code
    for number in {0, 1, 3}:
        assert ranks[number].exitcode == ExitCode.RANK_FAILURE
        assert (tmp_path / str(number)).read_text().startswith(said)


def test_one_rank_calls_nobody():
    store = dist.PrefixStore("", dist.HashStore())
    with (
        pytest.raises(RuntimeError, match="of gloo"),
        HangDetector(store, 0, 1, TIMEOUT) as hang_detector,
        hang_detector.naming_failed_ranks(),
    ):
        raise RuntimeError("of gloo")


def test_other_errors_stay_what_they_are():
    store = dist.PrefixStore("", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    with (
        pytest.raises(RuntimeError, match="shapes"),
        HangDetector(store, 0, 2, TIMEOUT) as hang_detector,
        hang_detector.naming_failed_ranks(),
    ):
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize(("timeout", "kept"), [(600, 10), (20, 10), (6, 3), (1, 0.5)])
def test_most_of_the_time_out_is_for_waiting(timeout, kept):
    assert reserve(timeout) == kept
