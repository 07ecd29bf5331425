"""How often fasttrain.monitor is wrong: false alarms per million steps, and what it finds within how many steps.

docs/monitor.md states these rates. The seeds are fixed, so that the figures are the same on every machine. Ten minutes:
make bench-long.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.fasttrain.monitor.simulated import NOISES, anomalies, curves, noisy_run, slow_run, spike

pytestmark = pytest.mark.long
MILLION = 1_000_000
AT = 350


def test_false_alarms_of_spikes(report) -> None:
    table = {}
    for name, noise in NOISES.items():
        found = anomalies(*noisy_run(noise, MILLION, seed=1))
        kinds = [anomaly.kind for _, anomaly in found]
        table[name] = {"spikes": kinds.count("spike"), "warnings": kinds.count("warning")}
    report("monitor_noise: false alarms in a million steps", table)
    assert all(row["spikes"] <= 5 for row in table.values())


def test_false_alarms_of_curves(report) -> None:
    table = {}
    for name, (loss, norm) in curves(600).items():
        row = {"runs": 0, "spikes": 0, "warnings": 0}
        for sigma in (0.005, 0.05, 0.3):
            for seed in range(100):
                noise = np.random.default_rng(seed).standard_normal((2, 600))
                found = anomalies(loss + sigma * noise[0], norm * np.exp(0.2 * noise[1]))
                row["runs"] += 1
                row["spikes"] += sum(anomaly.kind == "spike" for _, anomaly in found)
                row["warnings"] += sum(anomaly.kind == "warning" for _, anomaly in found)
        table[name] = row
    report("monitor_curves: false alarms in runs of 600 steps", table)
    assert all(row["spikes"] == 0 for row in table.values())


def test_detection_of_spikes(report) -> None:
    table = {}
    for shape in ("step", "decaying", "building up"):
        for size in (5, 6, 8, 12, 30):
            delays = []
            for seed in range(200):
                loss, norm = noisy_run(NOISES["normal"], AT + 60, seed)
                found = anomalies(loss + 0.05 * spike(shape, size, AT, AT + 60), norm)
                delays += [step - AT + 1 for step, anomaly in found if anomaly.kind == "spike"][:1]
            steps = {"median": float(np.median(delays)), "most": max(delays)} if delays else {}
            table[f"{shape}, {size} sigma"] = {"found": len(delays) / 200, **steps}
    report("monitor_spikes: share found, and after how many steps", table)
    assert all(row["found"] == 1 for name, row in table.items() if name.endswith((" 12 sigma", " 30 sigma")))


def test_slow_downs(report) -> None:
    table: dict[str, dict[str, float]] = {}
    for name, tail in (("noise of 10%", 0.0), ("and one step in 20 is much slower", 0.05)):
        runs = 40
        false = sum(len(slow_run(5000, seed, ranks=2, tail=tail)) for seed in range(runs))
        table[name] = {"false alarms in 200,000 steps": false}
        for cause in ((None, "data"), (2, "forward"), (None, "wait")):
            found = [
                (slow_run(420, begin, cause=cause, begin=begin, tail=tail, excess=0.3), begin)
                for begin in range(301, 361)
            ]  # every phase of the exchange
            first = [(news[0][0] - begin + 1, news[0][1]) for news, begin in found if news]
            table[f"{name}: {cause[1]} of {'all ranks' if cause[0] is None else f'rank {cause[0]}'}"] = {
                "found within 50": sum(delay <= 50 for delay, _ in first) / len(found),
                "median": float(np.median([delay for delay, _ in first])),
                "right": sum((news.rank, news.phase) == cause for _, news in first) / len(first),
            }
    report("monitor_slow_downs: regression of 30%", table)
    assert all(row.get("found within 50", 1) >= 0.99 for row in table.values())
