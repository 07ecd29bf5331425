"""Fits the figures of fasttrain/tools/plan/calibration.toml to the published runs that are not held out:

    python -m bench.fit_plan          # prints the errors; --write also writes the file

Coordinate descent from the figures that are there, on the mean of |log(predicted / published)|, each source weighing as
much as the square root of its points. The held-out points are looked at only after the last step, and decide nothing
but the band that is printed with a prediction: nine of ten of them are within it.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from pathlib import Path

from fasttrain.tools.plan import speed
from tests.fasttrain.tools.plan.published import Point, points

SHARED = ("bandwidth", "unfused", "exposed")
OWN = ("matmuls", "attention")
FITTED = ("ampere", "hopper", "ada-geforce")
BOUNDS = {
    "matmuls": (0.3, 1.0), "attention": (0.1, 0.9), "bandwidth": (0.5, 0.95), "unfused": (1.0, 6.0),
    "exposed": (0.02, 0.6),
}  # fmt: skip
ONE_SOURCE = ("ada-geforce",)
# Figures for architectures without a published run: those of the nearest one, and twice the band
BORROWED = {
    "ada": "ada-geforce", "ampere-geforce": "ada-geforce", "blackwell-geforce": "ada-geforce", "blackwell": "hopper",
    "cdna3": "hopper",
}  # fmt: skip

Figures = dict[tuple[str, str], float]  # ("shared" or an architecture, name) -> value


def calibration_of(figures: Figures, architecture: str) -> speed.Calibration:
    values = {name: figures["shared", name] for name in SHARED} | {n: figures[architecture, n] for n in OWN}
    return speed.Calibration(**values, band=0.0)


def errors(figures: Figures, chosen: list[Point]) -> list[float]:
    given = {a: calibration_of(figures, a) for a in FITTED}
    return [point.error(given[point.hardware.gpu.architecture]) for point in chosen]


def fit(figures: Figures, chosen: list[Point]) -> Figures:
    counts = Counter(point.source for point in chosen)
    weights = [counts[point.source] ** -0.5 for point in chosen]

    def objective(candidate: Figures) -> float:
        logs = [abs(math.log1p(error)) for error in errors(candidate, chosen)]
        return sum(w * (x + 2 * x * x) for w, x in zip(weights, logs, strict=True)) / sum(weights)

    best, step = objective(figures), 0.2
    while step > 0.002:
        improved = False
        for key, value in list(figures.items()):
            low, high = BOUNDS[key[1]]
            for factor in (1 + step, 1 / (1 + step)):
                candidate = figures | {key: min(max(value * factor, low), high)}
                if (found := objective(candidate)) < best - 1e-7:
                    figures, best, improved = candidate, found, True
                    break
        if not improved:
            step /= 2
    return figures


def start() -> Figures:
    given = speed.calibrations()
    figures: Figures = {("shared", name): getattr(given["ampere"], name) for name in SHARED}
    return figures | {(a, name): getattr(given[a], name) for a in FITTED for name in OWN}


def text(figures: Figures, band: float) -> str:
    lines = ["# Written by python -m bench.fit_plan --write; what the figures mean is in speed.py.", "[shared]"]
    lines += [f"{name} = {figures['shared', name]:.4g}" for name in SHARED] + [f"band = {band:.3f}"]
    for architecture in FITTED:
        lines += ["", f"[architectures.{architecture}]"]
        lines += [f"{name} = {figures[architecture, name]:.4g}" for name in OWN]
        if architecture in ONE_SOURCE:
            lines.append(f"band = {1.5 * band:.3f}  # one source only")
    for architecture, nearest in BORROWED.items():
        lines += ["", f"# No published run is on one: the figures of {nearest}", f"[architectures.{architecture}]"]
        lines += [f'from = "{nearest}"', f"band = {2 * band:.3f}"]
        lines += [f"{name} = {figures[nearest, name]:.4g}" for name in OWN]
    return "\n".join(lines) + "\n"


def describe(name: str, chosen: list[Point], found: list[float]) -> None:
    sizes = [abs(error) for error in found]
    print(f"{name}: {len(found)} points, median {statistics.median(sizes):.1%}, greatest {max(sizes):.1%}")
    by_source: dict[str, list[tuple[float, str]]] = {}
    for point, error in zip(chosen, found, strict=True):
        by_source.setdefault(point.source, []).append((error, point.id))
    for source, rows in by_source.items():
        print(f"  {source:<18} {len(rows):3} points, median {statistics.median(abs(e) for e, _ in rows):.1%}")
        for error, id in sorted(rows, key=lambda row: -abs(row[0]))[: 6 if "-v" in sys.argv else 2]:
            print(f"      {error:+.1%} {id}")


def main() -> None:
    calibration = [point for point in points() if not point.held_out]
    held_out = [point for point in points() if point.held_out]
    figures = fit(start(), calibration)
    held_out_errors = errors(figures, held_out)
    band = statistics.quantiles((abs(error) for error in held_out_errors), n=10)[-1]
    print(text(figures, band))
    describe("calibration", calibration, errors(figures, calibration))
    describe("held out", held_out, held_out_errors)
    if "--write" in sys.argv:
        Path(speed.TABLE).write_text(text(figures, band))


if __name__ == "__main__":
    main()
