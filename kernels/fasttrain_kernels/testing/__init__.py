"""Proof of Triton kernels without a GPU: numbers, memory traffic, and accuracy against a reference."""

from fasttrain_kernels.testing.accuracy import (
    Comparison,
    ComparisonOverSeeds,
    assert_accurate,
    assert_accurate_over_seeds,
    compare,
    compare_over_seeds,
)
from fasttrain_kernels.testing.interpreter import (
    KernelError,
    Launch,
    Launches,
    OutOfBounds,
    Traffic,
    WriteRace,
    interpret,
)

__all__ = [
    "Comparison",
    "ComparisonOverSeeds",
    "KernelError",
    "Launch",
    "Launches",
    "OutOfBounds",
    "Traffic",
    "WriteRace",
    "assert_accurate",
    "assert_accurate_over_seeds",
    "compare",
    "compare_over_seeds",
    "interpret",
]
