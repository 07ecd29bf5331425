"""A second opinion: Triton's FpSan replaces floats by exact integer algebra, so that roundings and orders of summation
do not matter and all targets have to agree bit for bit."""

from __future__ import annotations

import pytest
import torch
import triton

from fasttrain_kernels import attention, rms_norm, swiglu
from fasttrain_kernels.testing import execute

pytestmark = pytest.mark.skipif(triton.__version__ < "3.9", reason="FpSan compiles ahead of time from triton 3.9 on")


def _attention(*inputs: torch.Tensor) -> torch.Tensor:
    return attention(*(x.bfloat16().view(1, 70, 1, 64) for x in inputs), backend="triton")


@pytest.mark.parametrize(
    ("op", "shapes"),
    [(swiglu, [(3, 64), (3, 64)]), (rms_norm, [(3, 64), (64,)]), (_attention, [(70, 64)] * 3)],
    ids=["swiglu", "rms_norm", "attention"],
)
def test_all_targets_compute_the_same_algebra(op, shapes, monkeypatch):
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", "fpsan")
    results = []
    for target in ("sm_80", "sm_90", "sm_100", "sm_120"):
        with execute(target) as launches:
            results.append(op(*inputs).view(torch.uint8))
        assert launches
    assert all(torch.equal(result, results[0]) for result in results[1:])
