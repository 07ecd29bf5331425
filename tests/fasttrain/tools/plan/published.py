"""Runs that others have published, with their speed: what the speed model is fitted to, and what it is judged by."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fasttrain import config
from fasttrain.gpus import find_gpu
from fasttrain.tools.plan.speed import Calibration, Hardware, Work, speed

TABLE = Path(__file__).with_name("published.toml")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A published speed, and the run that it is of."""

    id: str
    source: str
    held_out: bool
    rate: float  # tokens per second and GPU
    work: Work
    hardware: Hardware
    memory_gib: float | None

    def error(self, calibration: Calibration | None = None) -> float:
        """Predicted over published, less one."""
        return speed(self.work, self.hardware, calibration).rate / self.rate - 1


@cache
def points() -> tuple[Point, ...]:
    table: dict[str, Any] = tomllib.loads(TABLE.read_text("utf-8"))
    return tuple(_point(row, table) for row in table["points"])


def is_held_out(id: str, split: str) -> bool:
    """By the rule at the head of published.toml."""
    return split == "held out" or hashlib.sha256(id.encode()).digest()[0] % 3 == 0


def _point(row: dict[str, Any], table: dict[str, Any]) -> Point:
    gpu, shape = find_gpu(row["gpu"]), table["models"][row["model"]]
    if "bandwidth" in row:
        gpu = replace(gpu, bandwidth=row["bandwidth"] * 1e9)
    network = row["network"] * 1e9 / 8 if "network" in row else None
    sharding, fused, recomputed = row.get("sharding", "fsdp"), row.get("fused", False), row.get("recomputed", 0.0)
    model = config.ModelConfig(
        **{name: shape[name] for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")},
        ffn=shape["ffn"] if shape.get("gated", True) else shape["ffn"] * 2 // 3,
        tied_head=shape.get("tied", False),
        qk_norm=False,
    )
    node = min(gpu.node, row["gpus"])
    work = Work(
        model=model,
        vocab=shape["vocab"],
        sequence=row["sequence"],
        micro=row["micro"],
        micro_batches=row["accumulation"],
        dp_size=row["gpus"],
        dp_replicate=max(row["gpus"] // node, 1) if sharding == "hsdp" else 1,
        fused=fused,
        compiled=fused,
        recomputed=recomputed,
        recomputed_streaming=1.0 if recomputed else 0.0,
        gathers=0 if sharding == "ddp" else 2,
        reduced=row.get("reduced", 4),
        linear_loss=False,
        gated=shape.get("gated", True),
    )
    return Point(
        id=row["id"],
        source=row["source"],
        held_out=is_held_out(row["id"], table["sources"][row["source"]]["split"]),
        rate=row["rate"],
        work=work,
        hardware=Hardware.of(gpu, row["gpus"], node=gpu.node, network=network),
        memory_gib=row.get("memory_gib"),
    )
