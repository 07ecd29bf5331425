"""Runs that never were: noise of known kinds, curves, spikes, and steps that get slower."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fasttrain.events import Anomaly
from fasttrain.monitor.slowdown import EVERY, Medians, Slowdown, SlowdownDetector
from fasttrain.monitor.spikes import SpikeDetector

Noise = Callable[[np.random.Generator, int], np.ndarray]


def autocorrelated(correlation: float) -> Noise:
    """AR(1): what happens when data are not well shuffled."""

    def noise(rng: np.random.Generator, steps: int) -> np.ndarray:
        fresh, value, out = np.sqrt(1 - correlation**2) * rng.standard_normal(steps), 0.0, np.empty(steps)
        for step in range(steps):
            value = out[step] = correlation * value + fresh[step]
        return out

    return noise


NOISES: dict[str, Noise] = {
    "normal": lambda rng, steps: rng.standard_normal(steps),
    "Student t, 3 degrees": lambda rng, steps: rng.standard_t(3, steps),
    "Student t, 2 degrees": lambda rng, steps: rng.standard_t(2, steps),
    "exponential": lambda rng, steps: rng.exponential(size=steps),
    "correlated 0.5": autocorrelated(0.5),
    "correlated 0.9": autocorrelated(0.9),
}


def anomalies(losses: Iterable[float], norms: Iterable[float], **options: Any) -> list[tuple[int, Anomaly]]:
    """All that are not normal and are new, by step."""
    detector = SpikeDetector(**options)
    found = (
        (step, detector.observe(float(x), float(y))) for step, (x, y) in enumerate(zip(losses, norms, strict=True))
    )
    return [(step, anomaly) for step, anomaly in found if anomaly and anomaly.is_new]


def noisy_run(noise: Noise, steps: int, seed: int, sigma: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Losses and gradient norms of a run that has settled; those of the norm are log-normal, if the noise is normal."""
    rng = np.random.default_rng(seed)
    return 3 + sigma * noise(rng, steps), np.exp(0.3 * noise(rng, steps))


def curves(steps: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Without noise: loss and gradient norm."""
    t = np.arange(steps)
    return {
        "fast start": (3 + 7 * np.exp(-t / 30), 0.5 + 5 * np.exp(-t / 15)),
        "power law": (2 + 8.5 * (1 + t / 20) ** -0.5, 0.3 + 3 / (1 + t / 5)),
        "late start": (2 + 8.5 / (1 + np.exp((t - 100) / 15)), 0.3 + 2 * np.exp(-(((t - 100) / 40) ** 2))),
        "plateau": (8.3 - 2 * np.clip(t / 50, 0, 1), np.full(steps, 0.7)),
        "decay of the rate": (3 - 0.3 * np.clip(t / steps * 5 - 4, 0, 1), 0.3 + 0.4 * np.clip(t / steps * 5 - 4, 0, 1)),
    }


def spike(shape: str, size: float, at: int, steps: int) -> np.ndarray:
    since = np.arange(steps) - at
    shapes = {
        "step": np.ones(steps),
        "decaying": np.exp(-since.clip(0) / 10),
        "building up": np.minimum((since + 1) / 10, 1.0),
        "one step": (since == 0).astype(float),
    }
    return size * shapes[shape] * (since >= 0)


PARTS = ("data", "forward", "backward", "wait", "optimizer", "checkpoint")
SECONDS = np.array([0.01, 0.3, 0.5, 0.0, 0.1, 0.001])


def slow_run(
    steps: int,
    seed: int,
    *,
    ranks: int = 4,
    cause: tuple[int | None, str] = (None, "data"),  # rank, None for all, and part
    begin: int = 10**9,  # of the slow steps
    end: int = 10**9,
    excess: float = 0.2,
    noise: float = 0.1,
    tail: float = 0.0,  # share of steps that take much longer, as Pareto has it
) -> list[tuple[int, Slowdown]]:
    """Reports by step: ranks that meet at the end of each step, with a checkpoint of 2 s every 100."""
    rng, found = np.random.default_rng(seed), []
    detector, medians = SlowdownDetector(), [Medians() for _ in range(ranks)]
    slow_ranks = slice(None) if cause[0] is None else cause[0]
    for step in range(1, steps + 1):
        shared, own = 1 + noise * rng.standard_normal(), 0.02 * rng.standard_normal((ranks, len(PARTS)))
        times = SECONDS * np.maximum(shared + own, 0.3)
        if rng.random() < tail:
            times *= 1 + rng.pareto(1.5)
        times[:, PARTS.index("checkpoint")] += 2.0 * (step % 100 == 0)
        if begin <= step < end:
            times[slow_ranks, PARTS.index(cause[1])] += excess * SECONDS.sum()
        times[:, PARTS.index("wait")] += times.sum(axis=1).max() - times.sum(axis=1)
        for rank in range(ranks):
            medians[rank].add(dict(zip(PARTS, times[rank].tolist(), strict=True)))
        if step % EVERY == 0 and (news := detector.observe([m.vector() for m in medians], step)):
            found.append((step, news))
    return found
