"""Two nodes, each with a network of its own, and the link between them."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.metrics.jsonl import read_metrics
from tests.faults.conftest import Row
from tests.faults.namespaces import ADDRESSES, INTERFACE, Shell, two_nodes
from tests.faults.processes import finished, last_step, launched, torchrun, wait_for
from tests.faults.test_ranks import children, is_alive
from tests.runs import command, curve, events, weights

OPTIONS = [
    *("--batch.steps", 12, "--checkpoint.every", 4, "--validation.every", 0, "--model.dropout", 0.2),
    *("--data.lint", "off", "--validation.sample", "", "--batch.micro", 1),
]
TIMEOUT = 8  # seconds: parallel.timeout

pytestmark = pytest.mark.faults


@contextlib.contextmanager
def started(nodes: tuple[Shell, Shell], run: Path, *options: Any, ranks: int) -> Iterator[list[subprocess.Popen[str]]]:
    """torchrun on both nodes, with so many ranks each. They share a file system, as nodes of a cluster do."""
    with contextlib.ExitStack() as stack:
        processes = []
        for number, node in enumerate(nodes):
            launcher = torchrun(
                "--nnodes=2", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
                f"--rdzv-endpoint={ADDRESSES[0]}:29400", f"--rdzv-conf=is_host={1 - number}",
                f"--local-addr={ADDRESSES[number]}", "--rdzv-id=faults",
            )  # fmt: skip
            argv = [*node.enter("--user", "--net"), *launcher, "-m", "fasttrain.train", *command(run, *options)]
            processes.append(stack.enter_context(launched(argv, GLOO_SOCKET_IFNAME=f"{INTERFACE}{number}")))
        yield processes


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_nodes_train_as_one_with_as_many_ranks(tmp_path: Path, row: Row, ranks: int) -> None:
    run = tmp_path / "two"
    with two_nodes() as nodes, started(nodes, run, *OPTIONS, ranks=ranks) as processes:
        for process in processes:
            said = process.communicate(timeout=240)[0]
            assert process.returncode == 0, said[-3000:]
    finished(tmp_path / "one", *OPTIONS, world=2 * ranks)
    two, one = read_metrics(run), read_metrics(tmp_path / "one")
    for figure in ("step", "loss", "grad_norm"):
        assert curve(two, figure) == curve(one, figure)
    torch.testing.assert_close(weights(run), weights(tmp_path / "one"), rtol=0, atol=0)
    row(
        f"two nodes with {ranks} rank{'s' * (ranks > 1)} each",
        happened=f"losses, gradient norms and all tensors are bitwise those of one node with {2 * ranks} ranks",
        lost="nothing",
        reported="nothing",
    )


def test_a_cut_link_ends_both_nodes(tmp_path: Path, row: Row) -> None:
    """The ranks of both. torchrun of the node that loses its rendezvous waits for that itself, for minutes."""
    run = tmp_path / "run"
    endless = [*OPTIONS, "--batch.steps", 100_000, "--parallel.timeout", TIMEOUT]
    with two_nodes() as nodes, started(nodes, run, *endless, ranks=1) as processes:
        wait_for(
            lambda: last_step(run) >= 10, 120, lambda: all(process.poll() is None for process in processes), lambda: ""
        )
        ranks = [rank for process in processes for rank in children(process.pid)]
        assert len(ranks) == 2
        nodes[0].must(f"ip link set {INTERFACE}0 down")
        begin = time.monotonic()
        seconds: dict[int, float] = {}
        while len(seconds) < 2:
            for node, rank in enumerate(ranks):
                if node not in seconds and not is_alive(rank):
                    seconds[node] = time.monotonic() - begin
            assert time.monotonic() - begin < TIMEOUT + 30, seconds
            time.sleep(0.05)
    assert max(seconds.values()) < TIMEOUT
    saved, done = list_checkpoints(run / "checkpoints"), last_step(run)
    for checkpoint in saved:
        checkpoint.verify()
    assert done - saved[-1].step <= 2 * 4
    (lost,) = events(run, "rank failure")
    assert lost["text"] == "rank 1 died or does not answer"
    row(
        "the link between two nodes is cut",
        happened=f"their ranks ended {seconds[0]:.1f} and {seconds[1]:.1f} s later (parallel.timeout {TIMEOUT})",
        lost=f"{done - saved[-1].step} steps, at a checkpoint every 4",
        reported=f"event `rank failure`: {lost['text']}",
    )
