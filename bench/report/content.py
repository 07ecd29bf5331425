"""The contents of the page and the table: the newest stored figures of each hardware, and predictions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.static.gpus import CARDS
from bench.tracking import Run

STATIC = Path(__file__).parents[1] / "results" / "static.json"
OURS, EAGER = "fasttrain", "eager"


@dataclass(frozen=True)
class Kernel:
    """One implementation at one size, measured."""

    op: str
    passes: str
    size: dict[str, int]
    dtype: str
    implementation: str
    figures: dict[str, float]  # time, of eager, rate, of the limit, peak
    bytes: int
    flops: int

    @property
    def shape(self) -> str:
        return " ".join(f"{letter}{number}" for letter, number in self.size.items())


@dataclass(frozen=True)
class Roof:
    bandwidth: float  # bytes/s
    flops: float  # FLOP/s


@dataclass
class Place:
    """All runs on one hardware."""

    hardware: dict[str, Any]
    runs: list[Run] = field(default_factory=list)  # the oldest first
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # the newest of each name
    kernels: list[Kernel] = field(default_factory=list)
    roof: dict[str, Roof] = field(default_factory=dict)  # by dtype

    @property
    def name(self) -> str:
        if self.hardware["gpu"]:
            return f"{self.hardware['gpus']} x {self.hardware['gpu']}"
        return f"{self.hardware['cpu']}, {self.hardware['cores']} cores"

    def memory_over_vocabulary(self) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for one in self.kernels:
            if one.passes == "memory":
                found.setdefault(one.implementation, []).append((one.size["V"], one.figures["peak"]))
        return {name: sorted(points) for name, points in found.items()}


@dataclass(frozen=True)
class Predicted:
    """A pass of an op on a GPU, from its compiled kernels: not measured."""

    op: str
    passes: str
    provider: str
    shape: str
    bytes: int
    flops: int
    seconds: tuple[float, float, float]  # least, likely, most


@dataclass(frozen=True)
class PredictedTarget:
    name: str
    roof: Roof
    points: list[Predicted]


def places(runs: Iterable[Run]) -> list[Place]:
    """Return each hardware, the one with the newest run first."""
    found: list[Place] = []
    for run in runs:
        place = next((place for place in found if place.hardware == run.hardware), None)
        if place is None:
            found.append(place := Place(run.hardware))
        place.runs.append(run)
        place.rows |= run.rows
    for place in found:
        place.kernels, place.roof = _kernels(place.rows)
    return sorted(found, key=lambda place: place.runs[-1].date, reverse=True)


def _kernels(rows: dict[str, dict[str, Any]]) -> tuple[list[Kernel], dict[str, Roof]]:
    """Group rows by implementation and size; also return the rooflines that they were measured against."""
    groups: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}
    roofs = {}
    for name, row in rows.items():
        if "about" in row:
            where, figure = name.rsplit("/", 1)
            groups.setdefault(where, (row["about"], {}))[1][figure] = row["value"]
            if "bandwidth" in row["about"]:
                roofs[row["about"]["dtype"]] = Roof(row["about"]["bandwidth"], row["about"]["peak_flops"])
    kernels = [
        Kernel(
            a["op"], a["pass"], a["size"], a["dtype"], a["implementation"], found, a.get("bytes", 0), a.get("flops", 0)
        )
        for a, found in groups.values()
    ]
    return kernels, roofs


def targets(path: Path = STATIC) -> list[PredictedTarget]:
    """Return predictions for every GPU that kernels are compiled for; none if the analysis was not stored."""
    if not path.exists():
        return []
    launches: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text()):
        key = tuple(row[k] for k in ("target", "op", "pass", "provider", "shape"))
        launches.setdefault(key, []).append(row)
    found: dict[str, PredictedTarget] = {}
    for (target, op, passes, provider, shape), rows in launches.items():
        gpu = CARDS[target].gpu
        low, mid, high = (sum(row["predicted_us"][i] for row in rows) * 1e-6 for i in range(3))
        total_bytes, flops = (sum(row[figure] for row in rows) for figure in ("bytes_memory", "flops"))
        place = found.setdefault(target, PredictedTarget(gpu.name, Roof(gpu.bandwidth, gpu.half), []))
        place.points.append(Predicted(op, passes, provider, shape, total_bytes, flops, (low, mid, high)))
    return list(found.values())
