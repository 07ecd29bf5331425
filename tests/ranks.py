"""Several ranks on one machine, as torchrun would start them. A forkserver imports torch once for all of them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from fasttrain.metrics import hardware


def run_ranks(worker: Callable[..., None], world: int, *args: Any, seconds: float = 120.0) -> None:
    """worker(*args) on every rank, in torchrun's environment; an error of one, or no end in time, fails the test."""
    mp.get_context("forkserver").set_forkserver_preload([__name__, "fasttrain.train.loop", "torch._dynamo"])
    port = free_port()
    context = mp.start_processes(
        _rank, (world, port, worker, args), nprocs=world, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + seconds
    while not context.join(timeout=max(deadline - time.monotonic(), 0.1)):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise AssertionError(f"{world} ranks did not finish within {seconds:g} s")


def _rank(rank: int, world: int, port: int, worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    hardware._SECONDS = 0.0  # as in conftest.py
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    worker(*args)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
