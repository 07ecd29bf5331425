"""How soon a small model on a CPU has a loss: steps per second, and CPU time to the loss that a GPT-2 ends at.

bench/small.py has the models. Steps are interleaved in one process, and both see the same batches.
"""

import statistics
from unittest.mock import patch

import pytest

from bench.figures import ratio, seconds
from bench.small import STEPS, Text, Trained, gpt2, ours, seconds_of_steps, validation
from fasttrain.config import OptimConfig
from fasttrain_kernels import cpp

MUON = OptimConfig(kind="muon", lr=1.6e-2, muon_lr=0.02, warmup=20, final=0.0)
SEEDS = 3
SHARE = 0.175  # of the GPT-2's steps that ours makes
ROUNDS, STEPS_OF_A_ROUND = 9, 12


def interleaved(trained: dict[str, Trained], rounds: int = ROUNDS) -> dict[str, float]:
    """CPU seconds of a step of each: the median over rounds."""
    text, taken = Text(), {name: list[float]() for name in trained}
    for number in range(-1, rounds):
        batches = [text.batch(0, number % rounds * STEPS_OF_A_ROUND + n) for n in range(STEPS_OF_A_ROUND)]
        for name, each in trained.items():
            spent = seconds_of_steps(each, batches)
            taken[name] += [spent / STEPS_OF_A_ROUND] if number >= 0 else []  # the first one compiles and warms up
    return {name: statistics.median(values) for name, values in taken.items()}


def test_a_step_of_nanogpts_recipe(report):
    adamw = OptimConfig(lr=1e-3)
    torch_alone = ours(0, adamw)

    def without_cpp(number, windows):
        with patch.object(cpp, "missing", lambda: "not asked for"), patch.object(cpp, "faster_matmuls", lambda: None):
            torch_alone.step(number, windows)

    found = interleaved(
        {
            "fasttrain": ours(0, adamw),
            "fasttrain, Muon": ours(0, MUON),
            "fasttrain without C++": torch_alone._replace(step=without_cpp),
            "GPT-2, eager": gpt2(0),
            "GPT-2, compiled": gpt2(0, compiled=True),
        }
    )
    least = {"GPT-2, eager": 1.5, "GPT-2, compiled": 1.2}
    report(
        "step_small: 4 layers, hidden 128, 12 x 64 characters, float32, one thread of a CPU",
        {
            name: {"CPU": seconds(cpu), "fasttrain's speed": ratio(cpu / found["fasttrain"], at_least=least.get(name))}
            for name, cpu in found.items()
        },
    )


@pytest.mark.parametrize("hidden", [128, pytest.param(384, marks=pytest.mark.long)])
def test_time_to_the_loss_of_a_gpt2(report, hidden):
    """Ours is a finished run too: its schedule ends where its steps do."""
    text, table, steps = Text(), {}, int(SHARE * STEPS)
    size = dict(hidden=hidden, layers={128: 4, 384: 6}[hidden])
    for seed in range(SEEDS):
        theirs, mine, spent = gpt2(seed, **size), ours(seed, MUON, steps=steps, **size), {}
        for name, trained, last in (("GPT-2", theirs, STEPS), ("fasttrain", mine, steps)):
            batches = [text.batch(seed, step) for step in range(last)]
            spent[name] = seconds_of_steps(trained, batches)
        losses = {"GPT-2": validation(theirs, text), "fasttrain": validation(mine, text)}
        table[f"seed {seed}"] = {
            "GPT-2": seconds(spent["GPT-2"]),
            "its loss": losses["GPT-2"],
            "fasttrain": seconds(spent["fasttrain"]),
            "fasttrain's loss": losses["fasttrain"],
            "loss of its": ratio(losses["fasttrain"] / losses["GPT-2"], at_most=1.0, margin=0.02),
            "time of its": ratio(spent["fasttrain"] / spent["GPT-2"], at_most=0.2),
        }
    report(f"time_to_loss_{hidden}: nats per character, hidden {hidden}, 12 x 64 characters a step", table)
