"""A run whose steps become slower says by how much, in which part, and because of which rank."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fasttrain.metrics.step_timer import PhaseTimes
from fasttrain.train import main
from tests.ranks import run_ranks

RUN = [
    *("--model.layers", "1", "--model.hidden", "16", "--model.heads", "1", "--model.kv_heads", "1"),
    *("--model.head_dim", "16", "--model.ffn", "16", "--data.sequence", "16", "--batch.sequences", "2"),
    *("--batch.micro", "1", "--batch.steps", "170", "--optim.warmup", "5", "--checkpoint.every", "0"),
    *("--validation.every", "0", "--validation.sequences", "1", "--validation.sample", "", "--log.every", "100"),
    *("--log.tensorboard", "False"),
]
SLOW = 120  # steps, of which 20 are not looked at, and 160 at most are what is usual


def train(run: Path, part: str, *options: str) -> None:
    """Steps of 100 ms by the stopwatch; from step SLOW on, a part of the last rank takes 30 ms longer."""
    laps, measured = [], PhaseTimes.seconds

    def seconds(lap: PhaseTimes) -> dict[str, float]:
        if "forward" not in lap.names:  # of the machine's matmul rate
            return measured(lap)
        laps.append(lap)
        split = {"data": 0.001, "wait": 0.001, "forward": 0.03, "backward": 0.06, "optimizer": 0.007, "record": 0.001}
        if len(laps) > SLOW:
            split[part if dist.get_rank() == dist.get_world_size() - 1 else "wait"] += 0.03
        return split

    with patch.object(PhaseTimes, "seconds", seconds):
        assert main([*RUN, "--out", str(run), *options]) == 0


def events(run: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize(("world", "part"), [(1, "data"), pytest.param(2, "backward", marks=pytest.mark.slow)])
def test_the_part_and_the_rank_are_named_within_50_steps(tmp_path, world, part):
    run_ranks(train, world, tmp_path, part)
    (event,) = events(tmp_path, "slow-down")
    assert SLOW < event["step"] <= SLOW + 50
    assert (event["evidence"]["phase"], event["evidence"]["rank"]) == (part, world - 1)
    assert f"{part} of rank {world - 1}" in event["text"]
    evidence = event["evidence"]
    assert evidence["phase_seconds"] - evidence["phase_usual"] == pytest.approx(0.03)


def test_nobody_is_told_of_what_nobody_wants_to_know(tmp_path):
    run_ranks(train, 1, tmp_path, "data", "--monitor.slowdown", "0")
    assert not events(tmp_path, "slow-down")
