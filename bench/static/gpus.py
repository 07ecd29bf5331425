"""The GPU that stands for each target: its entry in fasttrain/gpus.toml, and figures that only this analysis uses."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.gpus import Gpu, find_gpu


@dataclass(frozen=True)
class Card:
    """One GPU with its multiprocessors and caches."""

    gpu: Gpu
    multiprocessors: int  # AMD: compute units
    l2_bytes: int  # MI300X: of its Infinity Cache
    fp32_lanes: int  # of a multiprocessor: fp32 operations per clock, two with each multiply-add

    @property
    def special_rate(self) -> float:
        """Special functions per second. Each multiprocessor computes 16 per clock (CUDA C++ Programming Guide,
        "Throughput of Native Arithmetic Instructions"; CDNA3: a quarter of the 64 lanes)."""
        return self.gpu.fp32 / 2 * 16 / self.fp32_lanes


_MB = 10**6
# Multiprocessors and L2: NVIDIA's architecture white papers (A100, GA102, Ada, H100, Blackwell) and AMD's CDNA3 white
# paper. MI300X: 256 MB of Infinity Cache; its fp32 figure counts packed operations, 128 per clock.
CARDS: dict[str, Card] = {
    "sm_80": Card(find_gpu("a100-80gb"), 108, 40 * _MB, 64),
    "sm_86": Card(find_gpu("rtx-3090"), 82, 6 * _MB, 128),
    "sm_89": Card(find_gpu("rtx-4090"), 128, 72 * _MB, 128),
    "sm_90": Card(find_gpu("h100-sxm"), 132, 50 * _MB, 128),
    "sm_100": Card(find_gpu("b200"), 148, 126 * _MB, 128),
    "sm_120": Card(find_gpu("rtx-5090"), 170, 96 * _MB, 128),
    "gfx942": Card(find_gpu("mi300x"), 304, 256 * _MB, 128),
}
