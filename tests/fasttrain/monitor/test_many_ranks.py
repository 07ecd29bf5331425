"""What ranks do together: exchange their figures, and add up the norms of sharded gradients."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from fasttrain.monitor.slowdown import Exchange
from fasttrain.optim.optimizer import gradient_norms
from tests.fasttrain.checkpoint.subject import Subject, run_ranks, whole


def on_two_ranks(group: dist.ProcessGroup, _: Path) -> None:
    exchange_figures(group)
    add_up_norms()


def exchange_figures(group: dist.ProcessGroup) -> None:
    exchange = Exchange(group)
    assert exchange.read() is None
    for turn in range(2):
        exchange.send([float(group.rank()), float(turn)])
        assert exchange.read() == [[0.0, turn], [1.0, turn]]
    assert exchange.read() is None


def add_up_norms() -> None:
    model = Subject().model
    tokens = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], tokens[:, 1:]).loss_sum.backward()
    found = gradient_norms([block.parameters() for block in model.blocks])
    for norm, block in zip(found, model.blocks, strict=True):
        squares = [whole(p.grad).square().sum() for p in block.parameters() if p.grad is not None]
        torch.testing.assert_close(norm, torch.stack(squares).sum().sqrt())


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)
