"""The roofline of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from bench.kernels.timing import measure
from fasttrain.gpus import gpu_of_device
from fasttrain.metrics.hardware import peak_flops
from fasttrain_kernels.testing.specs import OpWork

COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # beyond every cache

ROWS = 1024  # of the matrices


@dataclass(frozen=True)
class Limits:
    bandwidth: float  # bytes/s
    flops: float  # FLOP/s of matmuls

    def seconds(self, work: OpWork) -> float:
        """The least time of the work."""
        return max(work.bytes / self.bandwidth, work.flops / self.flops)

    def bound(self, work: OpWork) -> str:
        return "memory" if work.bytes / self.bandwidth >= work.flops / self.flops else "compute"


@cache
def limits(device: str, dtype: torch.dtype) -> Limits:
    """The vendor's figures of a known GPU; otherwise measured now: a copy, and matmuls."""
    if device == "cpu":
        return Limits(copy_bandwidth(device), matmul_rate())
    gpu = gpu_of_device(torch.cuda.get_device_name())
    return Limits(gpu.bandwidth if gpu else copy_bandwidth(device), peak_flops(torch.device(device), dtype))


def matmul_rate() -> float:
    """FLOP per second of CPU time, at best: by the clock, as a run measures it, a busy machine has less."""
    a, b = torch.randn(2, ROWS, ROWS)
    out = torch.empty_like(a)
    return 2 * ROWS**3 / min(measure({"matmul": lambda: torch.mm(a, b, out=out)}, "cpu")["matmul"])


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second, at best."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    best = min(measure({"copy": lambda: target.copy_(source)}, device)["copy"])
    return 2 * source.nbytes / best
