"""The learning rate as a pure function of the step: a resumed run needs nothing but its step.

step    0 .. warmup - 1     (step + 1) / (warmup + 1) of the peak: no step is wasted at zero
step    warmup              the peak
step    steps               `final` of the peak: the end of the run, one past its last step
"""

from __future__ import annotations

import math

from fasttrain import config


def learning_rate(optim: config.OptimConfig, step: int, steps: int) -> float:
    """Learning rate of a step (0-based) in a run of `steps`, as a fraction of the peak; past the end it stays there."""
    _check(optim, step, steps)
    if step < optim.warmup:
        return (step + 1) / (optim.warmup + 1)
    if optim.schedule == "constant":
        return 1.0
    start = steps * (1 - optim.decay_fraction) if optim.schedule == "wsd" else optim.warmup
    elapsed = min(max((step - start) / (steps - start), 0.0), 1.0)  # of the decay
    remaining = 0.5 * (1 + math.cos(math.pi * elapsed)) if optim.schedule == "cosine" else 1 - elapsed
    return optim.final + (1 - optim.final) * remaining


def _check(optim: config.OptimConfig, step: int, steps: int) -> None:
    if step < 0 or steps < 1:
        raise ValueError(f"learning_rate: step ({step}) must be at least 0 and steps ({steps}) at least 1")
    if optim.warmup < 0:
        raise ValueError(f"optim.warmup ({optim.warmup}) must be at least 0; 0 starts at the peak")
    if optim.warmup >= steps:
        raise ValueError(
            f"optim.warmup ({optim.warmup}) must be shorter than the run, batch.steps ({steps}): "
            "lower optim.warmup or train for longer"
        )
    if not 0 <= optim.final <= 1:
        raise ValueError(f"optim.final ({optim.final}) is a fraction of optim.lr, from 0 to 1")
    if optim.schedule == "wsd":
        if not 0 < optim.decay_fraction <= 1:
            raise ValueError(f"optim.decay_fraction ({optim.decay_fraction}) is a share of the run: above 0, at most 1")
        if optim.warmup + steps * optim.decay_fraction > steps:
            raise ValueError(
                f"optim.warmup ({optim.warmup}) and the decay (optim.decay_fraction {optim.decay_fraction} of {steps} "
                "steps) are longer than the run together: lower one of them"
            )
