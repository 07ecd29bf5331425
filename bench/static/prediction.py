"""Predicted time of a launch: a roofline with the shares of peak that comparable kernels reach. Never measured.

    bytes    those that pass a perfect L2 (cache.py) / bandwidth
    matrix   FLOPs of tl.dot / peak
    scalar   other FLOPs / fp32 peak, special functions / their rate

The slowest of the three divided by the share of its peak that such kernels reach, plus what a launch costs. The shares:

    bandwidth   0.85, and 8 us for a launch, fit published timings of Liger's forward kernels. QuACK publishes 0.90 of
                an H100's for RMSNorm, and 0.69 for Liger's.
    matrix      0.50: FlashAttention 3 publishes 740 of an H100's 989 TFLOP/s, and kernels in the style of Triton's
                tutorial reach about 0.77 of that; backward passes less.
    BLAS        0.70: the chunks of linear cross-entropy reach 0.80 on an H200 (QuACK).
    scalar      0.50: half of the instructions do something else.

low takes the best published share and no launch; high the worst. bench/results/static_published.json has the timings
that tests compare the band with.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.static.cache import memory_bytes
from bench.static.counts import Counts
from bench.static.gpus import Card
from bench.static.torch_ops import BLAS


@dataclass(frozen=True)
class Shares:
    """Shares of the peaks, and microseconds per launch."""

    bandwidth: float
    matrix: float
    blas: float
    scalar: float
    launch: float


BAND = {
    "low": Shares(0.95, 0.75, 0.9, 0.9, 0),
    "mid": Shares(0.85, 0.5, 0.7, 0.5, 8),
    "high": Shares(0.6, 0.3, 0.5, 0.3, 15),
}


def predicted_us(
    counts: Counts,
    card: Card,
    *,
    programs: int,
    resident: int,  # blocks on one multiprocessor
) -> list[float]:  # low, mid, high
    """Predict the microseconds of a launch."""
    memory = memory_bytes(counts, card, "perfect", programs=programs, resident=resident) / card.gpu.bandwidth
    matrix = counts.flops / card.gpu.half
    blas = counts.kernel.startswith(BLAS)
    scalar = max(counts.elementwise / card.gpu.fp32, counts.special / card.special_rate)
    return [
        round(1e6 * max(memory / s.bandwidth, matrix / (s.blas if blas else s.matrix), scalar / s.scalar) + s.launch, 2)
        for s in BAND.values()
    ]
