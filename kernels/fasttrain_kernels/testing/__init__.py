"""Proof of Triton kernels without a GPU: numbers, memory traffic, and accuracy against a reference."""

from fasttrain_kernels.testing.accuracy import Comparison, assert_accurate, compare
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
    "KernelError",
    "Launch",
    "Launches",
    "OutOfBounds",
    "Traffic",
    "WriteRace",
    "assert_accurate",
    "compare",
    "interpret",
]
