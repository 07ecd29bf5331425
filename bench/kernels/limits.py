"""What the machine could do at most: the roofline that a contender's share is of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from bench.kernels.ops import Work
from bench.kernels.timing import measure
from fasttrain.gpus import gpu_of_device
from fasttrain.metrics.hardware import peak_flops

COPIED = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes, beyond every cache


@dataclass(frozen=True)
class Limits:
    bandwidth: float  # bytes/s
    flops: float  # FLOP/s of matrix products

    def seconds(self, work: Work) -> float:
        """That the work takes at least."""
        return max(work.bytes / self.bandwidth, work.flops / self.flops)

    def bound(self, work: Work) -> str:
        return "memory" if work.bytes / self.bandwidth >= work.flops / self.flops else "compute"


@cache
def limits(device: str, dtype: torch.dtype) -> Limits:
    """Of a known GPU its vendor's figures, of anything else measured now: a copy, and matrix products."""
    gpu = gpu_of_device(torch.cuda.get_device_name()) if device == "cuda" else None
    return Limits(gpu.bandwidth if gpu else copy_bandwidth(device), peak_flops(torch.device(device), dtype))


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second, at best."""
    source = torch.ones(COPIED[device], dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    best = min(measure({"copy": lambda: target.copy_(source)}, device)["copy"])
    return 2 * source.nbytes / best
