"""Tests of Triton kernels without a GPU: numbers, memory traffic, and accuracy against a reference."""

import importlib
from typing import TYPE_CHECKING, Any

from fasttrain_kernels.testing.accuracy import (
    Comparison,
    ComparisonOverSeeds,
    assert_accurate,
    assert_accurate_over_seeds,
    compare,
    compare_over_seeds,
)

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name in __all__:  # the interpreter's: imported when it is first used, since it needs ml_dtypes
        return getattr(importlib.import_module("fasttrain_kernels.testing.interpreter"), name)
    raise AttributeError(f"module 'fasttrain_kernels.testing' has no attribute {name!r}")
