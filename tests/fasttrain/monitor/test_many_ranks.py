"""What ranks do together: exchange their figures, and add up the norms of sharded gradients."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from fasttrain.monitor.slowdown import EVERY, SlowdownDetector, SpeedMonitor
from fasttrain.optim.optimizer import gradient_norms
from tests.fasttrain.checkpoint.subject import Subject, run_ranks, whole


def on_two_ranks(group: dist.ProcessGroup, _: Path) -> None:
    exchange_figures(group)
    add_up_norms()


def exchange_figures(group: dist.ProcessGroup) -> None:
    monitor = SpeedMonitor(group, torch.device("cpu"), threshold=0.2)
    with patch.object(SlowdownDetector, "observe", return_value=None) as observe:
        for step in range(2 * EVERY + 1):
            assert observe.call_count == (step > EVERY)  # read after the step that follows the sending
            monitor.observe({"forward": 1.0 + group.rank(), "data": 3.0 * (step >= EVERY)}, {})
    (first, steps), (second, later) = (call.args for call in observe.call_args_list)
    assert (steps, later) == (EVERY, 2 * EVERY)
    assert [row[0] for row in first] == [1.0, 2.0]  # of whole steps, by rank
    assert [row[0] for row in second] == [2.5, 3.5]


def add_up_norms() -> None:
    model = Subject().model
    tokens = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    found = gradient_norms([block.parameters() for block in model.blocks])
    for norm, block in zip(found, model.blocks, strict=True):
        squares = [whole(p.grad).square().sum() for p in block.parameters() if p.grad is not None]
        torch.testing.assert_close(norm, torch.stack(squares).sum().sqrt())


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)
