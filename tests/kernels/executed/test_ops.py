"""The compiled kernels of every op, executed: outputs and gradients against float64, and nothing left undefined.

`make test` executes a few cases for sm_90, which launch every kernel; `make test-executed` all of them on all targets.
"""

from __future__ import annotations

import pytest

from fasttrain_kernels.testing import assert_accurate_over_seeds, execute
from tests.kernels.numbers.cases import CASES, DTYPES

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")
SHORT = [
    ("documents, outliers", "bf16"),
    ("documents, outliers", "fp32"),
    ("head dimension 128, scale 0.2", "bf16"),
    ("head dimension 128, scale 0.2", "fp32"),
    ("softcap, outliers", "bf16"),
    ("one query, outliers", "bf16"),
    ("rms_norm (7, 63)", "bf16"),
    ("rms_norm (2, 2049)", "fp32"),
    ("add_rms_norm (3, 1000)", "bf16"),
    ("qk_norm_rope", "bf16"),
    ("qk_norm_rope, partial, interleaved, D 63", "fp32"),
    ("linear_cross_entropy, all options", "bf16"),
    ("linear_cross_entropy (7, 16, 1000)", "fp32"),
    ("linear_cross_entropy_stats, all options", "bf16"),
    ("swiglu (2, 1025)", "bf16"),
]


def execute_case(name: str, dtype: str, target: str) -> set[str]:
    """Compare with float64; returns the kernels."""
    with execute(target) as launches:
        assert_accurate_over_seeds(CASES[name].op, **CASES[name].arguments(DTYPES[dtype]))
    assert launches.findings == []
    return {launch.kernel for launch in launches}


@pytest.mark.parametrize(("name", "dtype"), SHORT)
def test_compiled_kernels_are_as_accurate_as_eager(name, dtype):
    execute_case(name, dtype, "sm_90")


@pytest.mark.executed
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_are_as_accurate_as_eager_on_every_target(name, dtype, target):
    execute_case(name, dtype, target)
