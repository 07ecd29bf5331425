"""Spikes are found within steps; noise, curves and the first steps are none. bench/test_monitor.py has the rates."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fasttrain.monitor.spikes import SpikeDetector
from tests.fasttrain.monitor.simulated import NOISES, anomalies, curves, noisy_run, spike

RECORDED = Path(__file__).with_name("recorded")
AT = 350


def recorded(name: str) -> tuple[list[float], list[float]]:
    curve = json.loads((RECORDED / f"{name}.json").read_text())
    return curve["loss"], curve["grad_norm"]


@pytest.mark.parametrize("name", ["ordinary", "small_batch", "muon", "no_warmup", "long_warmup", "hot"])
def test_recorded_runs_without_a_spike(name: str) -> None:
    assert anomalies(*recorded(name)) == []


@pytest.mark.parametrize(("name", "begin"), [("rate_raised", 161), ("poisoned", 180)])
def test_recorded_runs_with_a_spike(name: str, begin: int) -> None:
    (step, anomaly), *later = anomalies(*recorded(name))
    assert anomaly.kind == "spike"
    assert anomaly.series == "loss"
    assert (step, anomaly.steps) == (begin + 3, 4)
    assert not any(other.kind == "spike" for _, other in later)


@pytest.mark.parametrize("name", NOISES)
def test_noise_is_no_spike(name: str) -> None:
    assert anomalies(*noisy_run(NOISES[name], 15_000, seed=0)) == []


@pytest.mark.parametrize("name", curves(1))
@pytest.mark.parametrize("sigma", [0.0, 0.005, 0.05, 0.3])
def test_curves_are_no_spike(name: str, sigma: float) -> None:
    loss, norm = curves(500)[name]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal((2, 500))
        assert anomalies(loss + sigma * noise[0], norm * np.exp(0.2 * noise[1])) == []


@pytest.mark.parametrize("shape", ["step", "decaying", "building up"])
@pytest.mark.parametrize("noise", ["normal", "Student t, 3 degrees"])
@pytest.mark.parametrize(("size", "within"), [(12, 12), (30, 8)])
def test_spikes_of_the_loss_are_found(shape: str, noise: str, size: float, within: int) -> None:
    for seed in range(5):
        loss, norm = noisy_run(NOISES[noise], AT + 40, seed)
        (step, anomaly), *_ = anomalies(loss + 0.05 * spike(shape, size, AT, AT + 40), norm)
        assert anomaly.kind == "spike"
        assert AT + 3 <= step < AT + within
        assert abs(step - anomaly.steps + 1 - AT) <= 5  # where it says that the rise began
        assert anomaly.expected == pytest.approx(3, abs=0.1)


def test_one_odd_step_is_nothing() -> None:
    loss, norm = noisy_run(NOISES["normal"], AT + 40, 0)
    odd = spike("one step", 5.0, AT, AT + 40)
    assert anomalies(loss + odd, norm * np.exp(odd)) == []


def test_a_norm_that_rises_alone_is_a_warning() -> None:
    loss, norm = noisy_run(NOISES["normal"], AT + 40, 0)
    (step, anomaly), *_ = anomalies(loss, norm * np.exp(spike("step", 3.0, AT, AT + 40)))
    assert (anomaly.kind, anomaly.series, step) == ("warning", "gradient norm", AT + 5)
    assert anomaly.value / anomaly.expected == pytest.approx(20, rel=0.6)


def test_a_spike_is_new_once_and_a_level_that_stays_becomes_the_usual_one() -> None:
    loss, norm = noisy_run(NOISES["normal"], 1200, 0)
    loss += spike("step", 3.0, AT, 1200) + spike("step", 3.0, 900, 1200)
    detector = SpikeDetector()
    kinds = [detector.observe(x, y) for x, y in zip(loss.tolist(), norm.tolist(), strict=True)]
    new = [step for step, anomaly in enumerate(kinds) if anomaly and anomaly.kind == "spike" and anomaly.is_new]
    assert new == [AT + 3, 903]
    during = [step for step, anomaly in enumerate(kinds) if anomaly and anomaly.kind == "spike"]
    assert 10 < len(during) < 80


@pytest.mark.parametrize(("loss", "norm", "series"), [(math.nan, 1.0, "loss"), (3.0, math.inf, "gradient norm")])
def test_values_that_are_not_finite_count_from_the_first_step_on(loss: float, norm: float, series: str) -> None:
    detector = SpikeDetector()
    before = detector.state()
    anomaly = detector.observe(loss, norm)
    assert (anomaly.kind, anomaly.is_new, anomaly.series) == ("not finite", True, series)
    assert str(anomaly) in ("loss is nan", "gradient norm is inf")
    if series == "loss":
        assert detector.state() == before


def test_infinite_norms_of_fp16_count_when_the_scale_does_not_help() -> None:
    detector = SpikeDetector(scaled=True)
    *before, last = [detector.observe(3.0, math.inf) for _ in range(50)]
    assert before == [None] * 49
    assert last.kind == "not finite"
    assert detector.observe(math.nan, math.inf).series == "loss"


def test_after_a_rollback_it_is_as_if_nothing_had_been() -> None:
    loss, norm = noisy_run(NOISES["normal"], 600, 0)
    detector = SpikeDetector()
    for x, y in zip(loss[:300].tolist(), norm[:300].tolist(), strict=True):
        detector.observe(x, y)
    state = json.loads(json.dumps(detector.state()))
    for _ in range(10):
        detector.observe(9.0, 50.0)
    detector.restore(state)
    assert detector.state() == state
    another = SpikeDetector()
    another.restore(state)
    for x, y in zip(loss[300:].tolist(), norm[300:].tolist(), strict=True):
        assert detector.observe(x, y) == another.observe(x, y)


def test_no_anomaly_in_the_first_steps() -> None:
    loss, norm = noisy_run(NOISES["normal"], 200, 0)
    loss = loss + spike("step", 3.0, 70, 200)
    assert anomalies(loss, norm, first=120) == []
    assert anomalies(loss, norm, first=64)


def test_anomalies_say_what_happened() -> None:
    loss, norm = noisy_run(NOISES["normal"], AT + 10, 0)
    ((_, anomaly),) = anomalies(loss + spike("step", 3.0, AT, AT + 10), norm)
    assert "instead of 3" in str(anomaly)
    assert "for 4 steps" in str(anomaly)
    evidence = json.loads(json.dumps(anomaly.evidence()))
    assert evidence.keys() == {"series", "value", "expected", "z", "steps"}
