"""The training command as processes that a test may harm.

A forkserver has imported everything, so that a process trains within a second. What a process of its own does, and what
becomes of it, is what `python -m fasttrain.train` does: its exit code, its signals, its output.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from fasttrain.metrics.jsonl import read_metrics
from fasttrain.train import main
from tests.ranks import free_port
from tests.runs import command

ROOT = Path(__file__).parents[2]
STALLED = 900.0  # seconds: a guard against what never ends, not a measurement; a loaded machine may take minutes
Fault = Callable[[], None]


class Training:
    """One process, or as many as ranks are given; use as a context, which kills what is left."""

    def __init__(
        self, run: Path, *options: Any, fault: Fault | None = None, world: int = 1, argv: list[str] | None = None
    ) -> None:
        """fault: called in every process before it trains; argv: the whole command, in place of options."""
        self.run, self._output = run, run.parent / f"{run.name}.output"
        self._output.touch()
        self._begin = self._output.stat().st_size
        ranks: list[dict[str, str]] = [{}]
        if world > 1:
            master = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world))
            ranks = [master | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(world)]
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__, "fasttrain.train.loop", "torch._dynamo"])
        argv = command(run, *options) if argv is None else argv
        self.ranks = [
            context.Process(target=_train, args=(argv, self._output, fault, environment), daemon=True)
            for environment in ranks
        ]
        for process in self.ranks:
            process.start()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            if process.is_alive():
                process.kill()  # also one that was stopped
            process.join(10)

    @property
    def is_running(self) -> bool:
        return all(process.is_alive() for process in self.ranks)

    def output(self) -> str:
        """What this process has said so far, on both streams."""
        with open(self._output, "rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def until(self, condition: Callable[[], Any], seconds: float = STALLED, *, pause: float = 0.005) -> Any:
        """Wait for something true."""
        return wait_for(condition, seconds, lambda: self.is_running, self.output, pause=pause)

    def until_step(self, step: int, seconds: float = STALLED) -> None:
        """Until a step has been recorded."""
        self.until(lambda: last_step(self.run) >= step, seconds)

    def signal(self, number: int, rank: int = 0) -> None:
        os.kill(self.ranks[rank].pid, number)

    def ends(self, seconds: float = STALLED, rank: int = 0) -> int:
        """The exit code, -n after signal n."""
        process = self.ranks[rank]
        process.join(seconds)
        assert process.exitcode is not None, f"still running after {seconds:g} s:\n{self.output()[-2000:]}"
        return process.exitcode


def finished(run: Path, *options: Any, fault: Fault | None = None, world: int = 1) -> str:
    """Train to the end; the output."""
    with Training(run, *options, fault=fault, world=world) as training:
        for rank in range(world):
            assert training.ends(rank=rank) == 0, training.output()[-2000:]
        return training.output()


@contextlib.contextmanager
def launched(argv: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Any command, in a session of its own that ends with the context."""
    variables = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=f"{ROOT}:{ROOT / 'kernels'}") | environment
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        if process.stdout:
            process.stdout.close()


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


def wait_for(
    condition: Callable[[], Any],
    seconds: float,
    is_running: Callable[[], bool],
    output: Callable[[], str],
    *,
    pause: float = 0.01,
) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert is_running() or condition(), f"it ended:\n{output()[-2000:]}"
        assert time.monotonic() < deadline, f"not within {seconds:g} s:\n{output()[-2000:]}"
        time.sleep(pause)
    return found


def last_step(run: Path) -> int:
    """That was recorded; 0: none."""
    metrics = read_metrics(run)
    return metrics[-1]["step"] if metrics else 0


def _train(argv: list[str], output: Path, fault: Fault | None, environment: dict[str, str]) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.environ.update(environment)
    torch.set_num_threads(1)
    if fault:
        fault()
    sys.exit(main(argv))
