"""The compiled kernels of every op, executed: outputs and gradients against float64, and nothing left undefined.

`make test` executes a few cases for sm_90, which launch every kernel; `make test-executed` all of them on all targets.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import triton

from fasttrain_kernels import ops
from fasttrain_kernels.testing import ExecutedLaunches, assert_accurate_over_seeds, compare, execute
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
    ("relu2 (2, 1025)", "bf16"),
]


def undefined(launches: ExecutedLaunches) -> list[str]:
    """Findings, but for one of the compiler: from Triton 3.9 on, registers of tcgen05.ld are used ahead of its wait."""
    newer = triton.__version__ >= "3.9"
    return [f for f in launches.findings if not (newer and "reads what tcgen05.ld loads" in f)]


def execute_case(name: str, dtype: str, target: str) -> set[str]:
    """Compare with float64; returns the kernels."""
    with execute(target) as launches:
        assert_accurate_over_seeds(CASES[name].op, **CASES[name].arguments(DTYPES[dtype]))
    assert undefined(launches) == []
    return {launch.kernel for launch in launches}


@pytest.mark.parametrize(("name", "dtype"), SHORT)
def test_compiled_kernels_are_as_accurate_as_eager(name, dtype):
    execute_case(name, dtype, "sm_90")


def test_these_cases_launch_every_kernel():
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    kernels = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }
    with execute("sm_90", races=False, bank_conflicts=False) as launches:
        for name, dtype in SHORT:
            compare(CASES[name].op, CASES[name].reference, CASES[name].inputs(DTYPES[dtype]))
    assert {launch.kernel for launch in launches} == kernels


# The other dtypes take the same instructions where they are not named; float32 has none of tensor cores.
EVERYWHERE = [
    (name, dtype, target)
    for target in TARGETS
    for dtype in DTYPES
    for name in CASES
    if dtype == "bf16"
    or (dtype == "fp32" and (target in ("sm_80", "sm_90") or (name, dtype) in SHORT))
    or (dtype == "fp16" and target in ("sm_90", "sm_100"))
]


@pytest.mark.executed
@pytest.mark.parametrize(("name", "dtype", "target"), EVERYWHERE)
def test_compiled_kernels_are_as_accurate_as_eager_on_every_target(name, dtype, target):
    execute_case(name, dtype, target)
