"""What the hardware can do and how much of it is in use: the denominators of a run's figures.

Model FLOPs utilisation is what a step has to compute, over what the device could have computed in that time:

    MFU = tokens per second of the run * flops_per_token / (number of ranks * peak_flops)

The peak of a known GPU is its vendor's figure for dense matrices, as published MFUs have it. Sparse figures, which data
sheets print first, are twice that and nothing that trains reaches them. Any other device is measured.
"""

from __future__ import annotations

import re
import resource
import sys
from time import perf_counter
from typing import NamedTuple

import torch

from fasttrain.metrics.stopwatch import Stopwatch

_SECONDS = 0.3  # of measuring
# Rows of the measured matrices: doubled while a product takes less than so many seconds, or while that still helps and
# there is time. Small ones measure how threads wait for each other, on a busy machine for 30 ms and more; large ones
# would be the peak of a small run's resident memory.
_ENOUGH = 0.03
_SMALLEST, _LARGEST = 256, {"cpu": 2048, "cuda": 8192}


class Rates(NamedTuple):
    """Dense products, in TFLOP/s."""

    half: float  # bf16 and fp16, accumulated in fp32
    tf32: float
    fp32: float


# By words of the device's name: the first row all of whose words are in it. Where a data sheet gives a figure "with
# sparsity" only, half of it; where it is of a board or superchip, that of one GPU.
_RATES = {
    # NVIDIA GB200 NVL72 and HGX B200 data sheets
    "GB200": Rates(2500, 1250, 80),
    "B200": Rates(2250, 1125, 75),
    # NVIDIA H200 data sheet
    "H200 NVL": Rates(835.5, 417.5, 60),
    "H200": Rates(989.5, 494.5, 67),
    # NVIDIA H100 data sheets; HBM3 is in the name of the SXM module only
    "H100 NVL": Rates(835.5, 417.5, 60),
    "H100 PCIe": Rates(756, 378, 51),
    "H100 HBM3": Rates(989.5, 494.5, 67),
    # NVIDIA GH200 data sheet
    "GH200": Rates(990, 494, 67),
    # NVIDIA A100, A10 and RTX A6000 data sheets
    "A100": Rates(312, 156, 19.5),
    "A10": Rates(125, 62.5, 31.2),
    "A6000": Rates(154.8, 77.4, 38.7),
    # NVIDIA L4, L40, L40S and RTX 6000 Ada data sheets
    "L4": Rates(121, 60, 30.3),
    "L40": Rates(181, 90.5, 90.5),
    "L40S": Rates(362, 183, 91.6),
    "6000 Ada": Rates(364.2, 182.1, 91.1),
    # NVIDIA's GA102, Ada and RTX Blackwell architecture white papers: GeForce cards accumulate in fp32 at half the rate
    # that is advertised, which is with fp16
    "RTX 3090": Rates(71, 35.6, 35.6),
    "RTX 4090": Rates(165.2, 82.6, 82.6),
    "RTX 5090": Rates(209.5, 104.8, 104.8),
    # AMD Instinct MI300X and MI325X data sheets
    "MI300X": Rates(1307.4, 653.7, 163.4),
    "MI325X": Rates(1307.4, 653.7, 163.4),
}
_OTHER_CARDS = {"MIG", "Laptop", "Ti", "D", "SUPER"}  # with one of these in its name, a GPU is not the one of the table


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of matrix products on one device: its vendor's figure, or measured in a third of a second."""
    rates = _rates(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if rates is None:
        return _measured(device, dtype)
    if dtype in (torch.bfloat16, torch.float16):
        return rates.half * 1e12
    if dtype == torch.float32:
        # Not torch.get_float32_matmul_precision: it raises where the precision was set by this newer name.
        return (rates.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else rates.fp32) * 1e12
    raise ValueError(f"peak_flops: there is no rate of {dtype}; use torch.bfloat16, torch.float16 or torch.float32")


def used_memory(device: torch.device) -> int:
    """Peak bytes of this process: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes


def _rates(name: str) -> Rates | None:
    words = set(re.split(r"\W+", name))
    if words & _OTHER_CARDS:
        return None
    return next((rates for key, rates in _RATES.items() if set(key.split()) <= words), None)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    """The best of many products, with this process's number of threads."""
    end = perf_counter() + _SECONDS
    generator = torch.Generator(device)  # of its own: how much is drawn here depends on the time that it takes
    rows, best = _SMALLEST, 0.0
    while True:
        a, b = (torch.randn(rows, rows, generator=generator, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = min(_product_seconds(a, b, out) for _ in range(2))  # the first of a size chooses its kernel
        helped = 2 * rows**3 / seconds > 1.5 * best
        best = max(best, 2 * rows**3 / seconds)
        if rows == _LARGEST[device.type] or not (helped or seconds < _ENOUGH) or perf_counter() > end:
            break
        rows *= 2
    while perf_counter() < end:
        best = max(best, 2 * rows**3 / _product_seconds(a, b, out))
    if device.type == "cuda":  # leave no trace in used_memory
        del a, b, out
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


def _product_seconds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    watch = Stopwatch(a.device)
    torch.mm(a, b, out=out)
    watch.mark("product")
    return watch.split()["product"]
