"""Slow-downs: found within 50 steps with their cause, and only those that last. bench/test_watch.py has the rates."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from fasttrain.monitor.slowdown import Medians, SlowdownDetector, probe, slowest
from tests.fasttrain.monitor.simulated import slow_run


@pytest.mark.parametrize("cause", [(None, "data"), (2, "forward"), (1, "data"), (None, "wait"), (3, "optimizer")])
def test_a_regression_of_a_third_is_found_with_its_cause(cause: tuple[int | None, str]) -> None:
    for begin, tail in ((301, 0.0), (304, 0.05), (308, 0.0)):
        end = begin + 80
        (found, news), (back, over) = slow_run(480, begin, cause=cause, begin=begin, end=end, tail=tail, excess=0.3)
        assert news.kind == "slow"
        assert found - begin < 50
        assert (news.rank, news.phase) == cause
        assert news.seconds / news.usual == pytest.approx(1.3, abs=0.08)
        assert over.kind == "over"
        assert begin + 80 < back < begin + 130


def test_what_is_reported_is_the_setting_or_more() -> None:
    """It was 12% or more, and "as fast as before" up to half of whatever noise had made the limit."""
    assert [news for seed in range(20) for news in slow_run(480, seed, begin=300, excess=0.13)] == []
    for noise in (0.1, 0.2, 0.3):
        for seed in range(20):
            for _, news in slow_run(480, seed, begin=300, end=400, excess=0.3, noise=noise):
                if news.kind == "slow":
                    assert news.seconds / news.usual >= 1.2
                else:
                    assert news.seconds / news.usual < 1.06


@pytest.mark.parametrize("tail", [0.0, 0.05])
def test_noise_and_checkpoints_are_no_slow_down(tail: float) -> None:
    assert slow_run(3000, 0, ranks=2, tail=tail) == []


def test_a_few_slow_steps_are_no_slow_down() -> None:
    assert slow_run(500, 0, cause=(None, "data"), begin=300, end=312, excess=5.0) == []


def test_on_a_noisy_machine_it_takes_a_larger_regression() -> None:
    assert slow_run(3000, 0, ranks=1, noise=0.4) == []
    assert slow_run(600, 0, ranks=1, noise=0.4, begin=400, excess=1.0)


def test_slower_still_is_news() -> None:
    detector, medians, news = SlowdownDetector(), Medians(), {}
    for step in range(1, 601):
        medians.add({"forward": 1.0 if step <= 300 else 1.3 if step <= 450 else 2.0})
        if step % 10 == 0 and (found := detector.observe([medians.vector()], step)):
            news[step] = found
    assert [round(found.seconds, 1) for found in news.values()] == [1.3, 2.0]
    assert all(found.rank == 0 for found in news.values())


def test_sensors_of_the_slow_rank_are_told() -> None:
    detector, medians = SlowdownDetector(), Medians()
    for step in range(1, 401):
        slow = step > 300
        medians.add({"forward": 1.5 if slow else 1.0, "validation": 9.0}, {"sm_clock": 1200.0 if slow else 1980.0})
        if step % 10 == 0 and (news := detector.observe([medians.vector()], step)):
            break
    assert news is not None
    assert news.sensors == {"sm_clock": (1980.0, 1200.0)}  # the others say nothing
    assert str(news).endswith("forward of rank 0, 1000 -> 1500 ms; sm_clock 1980 -> 1200")
    assert json.loads(json.dumps(asdict(news)))["phase"] == "forward"


def test_equal_work_tells_the_slowest() -> None:
    assert probe(torch.device("cpu"), rows=64) > 0
    assert slowest([1.0, 1.02, 1.5, 0.99]) == 2
    assert slowest([1.0, 1.02, 1.05]) is None
    assert slowest([1.0]) is None
