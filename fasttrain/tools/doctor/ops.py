"""Every op once, forward and backward, as training uses it here, against its reference in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fasttrain.tools.doctor.finding import Finding

SECTION = "ops"


def ops() -> Iterator[Finding]:
    """The tolerance is twice the error of eager PyTorch (fasttrain_kernels.testing.accuracy)."""
    try:
        from fasttrain_kernels.testing import self_check
    except ImportError as error:
        yield Finding(
            section=SECTION,
            name="kernel library",
            value=str(error),
            level="broken",
            remedy="pip install the package above",
        )
        return
    for case in self_check.CASES:
        for implementation in self_check.training_implementations():
            yield _checked(self_check, case, implementation)


def _checked(self_check: Any, case: Any, implementation: Any) -> Finding:
    name, how = case.name, f"{implementation.name}, {str(implementation.dtype).removeprefix('torch.')}"
    remedy = "do not train: run make test (make test-gpu on a GPU), and report what it says"
    try:
        results = self_check.run(case, implementation)
    except Exception as error:  # whatever an op does, it is this op that does it
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        value = f"{how}: fails with {type(error).__name__}: {first}"
        return Finding(section=SECTION, name=name, value=value, level="broken", remedy=remedy)
    share = max(result.error / result.tolerance for result in results)
    if wrong := [result for result in results if not result.ok]:
        return Finding(
            section=SECTION, name=name, value=f"{how}: {wrong[0]}", level="broken", remedy=remedy, figure=share
        )
    return Finding(section=SECTION, name=name, value=f"{how}: OK ({share:.0%} of tolerance)", figure=share)
