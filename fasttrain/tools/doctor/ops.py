"""Every op once, forward and backward, in the forms that training uses here, against its reference in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fasttrain.tools.doctor.finding import Finding

SECTION = "ops"


def ops() -> Iterator[Finding]:
    """Allowed is twice the error of eager PyTorch (fasttrain_kernels.testing.accuracy)."""
    try:
        from fasttrain_kernels.testing import tour
    except ImportError as error:
        yield Finding(
            section=SECTION,
            name="kernel library",
            value=str(error),
            level="broken",
            remedy="pip install the package above",
        )
        return
    for case in tour.CASES:
        for form in tour.forms_of_a_run():
            yield _checked(tour, case, form)


def _checked(tour: Any, case: Any, form: Any) -> Finding:
    name, how = case.name, f"{form.name}, {str(form.dtype).removeprefix('torch.')}"
    remedy = "do not train: run make test (make test-gpu on a GPU), and report what it says"
    try:
        results = tour.run(case, form)
    except Exception as error:  # whatever an op does, it is this op that does it
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        value = f"{how}: fails with {type(error).__name__}: {first}"
        return Finding(section=SECTION, name=name, value=value, level="broken", remedy=remedy)
    share = max(result.error / result.allowed for result in results)
    if wrong := [result for result in results if not result.ok]:
        return Finding(
            section=SECTION, name=name, value=f"{how}: {wrong[0]}", level="broken", remedy=remedy, figure=share
        )
    return Finding(
        section=SECTION, name=name, value=f"{how}: right, with {share:.0%} of the allowed error", figure=share
    )
