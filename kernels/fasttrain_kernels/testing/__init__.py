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
    from fasttrain_kernels.testing.executed import ExecutedLaunch, ExecutedLaunches, Fault, Unsupported, execute
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
    "ExecutedLaunch",
    "ExecutedLaunches",
    "Fault",
    "KernelError",
    "Launch",
    "Launches",
    "OutOfBounds",
    "Traffic",
    "Unsupported",
    "WriteRace",
    "assert_accurate",
    "assert_accurate_over_seeds",
    "compare",
    "compare_over_seeds",
    "execute",
    "interpret",
]
_EXECUTED = ("ExecutedLaunch", "ExecutedLaunches", "Fault", "Unsupported", "execute")


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when it is first used, since it needs triton and ml_dtypes
        package = "executed" if name in _EXECUTED else "interpreter"
        return getattr(importlib.import_module(f"fasttrain_kernels.testing.{package}"), name)
    raise AttributeError(f"module 'fasttrain_kernels.testing' has no attribute {name!r}")
