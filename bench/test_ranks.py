"""Ranks of one CPU thread each, over gloo: what a second one adds, and how much of its step waits for the other.

By the clock: CPU time does not show waiting. Runs are interleaved, so that a busy machine disturbs all alike.
"""

import os
import statistics
import sys

import pytest

from bench.commands import finished_run
from bench.figures import rate, ratio

ROUNDS, STEPS, WARM_UP = 2, 6, 2
MIN_SPEEDUP = 1.25  # times the tokens of one rank, with two
SETTINGS = ["--batch.sequences", 32, "--batch.micro", 8, "--batch.steps", STEPS, "--optim.warmup", 2]
NO_EXTRAS = ["--validation.every", 0, "--validation.sequences", 1, "--validation.sample", "", "--checkpoint.every", 0]
PROGRAMS = {
    1: [sys.executable, "-m", "fasttrain.train"],
    2: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fasttrain.train"],
}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_two_ranks_against_one(report, tmp_path):
    speeds: dict[int, list[float]] = {1: [], 2: []}
    waits, losses = [], {}
    for round in range(ROUNDS):
        for world, program in PROGRAMS.items():
            lines = finished_run(program, tmp_path / f"{round}-{world}", *SETTINGS, *NO_EXTRAS)
            losses[world] = [line["loss"] for line in lines]
            speeds[world] += [line["tokens_per_second"] for line in lines[WARM_UP:]]
            if world == 2:
                waits += [line["time/wait"] / line["step_seconds"] for line in lines[WARM_UP:]]
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)  # no speed without the right answer
    alone, two = (statistics.median(speeds[world]) for world in (1, 2))
    report(
        "ranks: recipe tiny, 32 x 256 tokens a step, one CPU thread a rank, FSDP2 over gloo",
        {
            "1 rank": {"tokens/s": rate(alone, "tokens/s")},
            "2 ranks": {
                "tokens/s": rate(two, "tokens/s"),
                "x 1 rank": ratio(two / alone, at_least=MIN_SPEEDUP, margin=0.25),
                "waits": statistics.median(waits),
            },
        },
    )
