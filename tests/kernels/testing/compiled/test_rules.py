"""Rules, regressions and stored figures."""

import dataclasses
from pathlib import Path

import pytest
import torch
import triton

from fasttrain_kernels.ops.swiglu import swiglu
from fasttrain_kernels.testing.compiled import record, rules
from fasttrain_kernels.testing.compiled.survey import Row

STORED = Path(__file__).parents[4] / "bench" / "results" / "compiled.json"


@pytest.fixture(scope="module")
def swiglu_row() -> Row:
    with record("sm_90") as launches:
        swiglu(torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(64, 4096, dtype=torch.bfloat16))
    return Row("sm_90", "swiglu", "bf16", "_swiglu_fwd_kernel", "", launches.metadata[0])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"registers": 8}, None),
        ({"registers": 64}, "registers was"),
        ({"spill_loads": 4}, "spilled bytes was 0 and is 4"),
        ({"shared": 1024}, "shared memory was 0 and is 1024"),
        ({"num_warps": 32, "registers": 40}, "resident warps was"),
        ({"loads": {64: 4}}, "share of 128-bit accesses was 100% and is 33%"),
    ],
)
def test_regressions_are_distinguished_from_improvements(swiglu_row, change, complaint):
    now = dataclasses.replace(swiglu_row, metadata=dataclasses.replace(swiglu_row.metadata, **change))
    found = rules.regressions(now, swiglu_row.metadata)
    assert not found if complaint is None else any(complaint in text for text in found)


def test_a_matmul_without_proxy_fence_is_a_problem(swiglu_row):
    assert rules.problems(swiglu_row) == []
    unfenced = dataclasses.replace(swiglu_row, metadata=dataclasses.replace(swiglu_row.metadata, unfenced=2))
    assert rules.problems(unfenced) == ["has 2 matmuls that may read what cp.async delivered without fence.proxy.async"]


def test_figures_survive_being_stored(swiglu_row, tmp_path):
    rules.write(tmp_path / "figures.json", rules.figures([swiglu_row]))
    version, figures = rules.read(tmp_path / "figures.json")
    assert version == triton.__version__
    assert rules.stored_metadata(swiglu_row, figures) == swiglu_row.metadata


@pytest.mark.parametrize(("kernel", "case"), rules.ALLOWED_SPILLS)
def test_an_allowed_spill_is_still_one(kernel, case):
    _, figures = rules.read(STORED)
    stored = [ops[op].get(f"{case}: {kernel}", {}) for ops in figures.values() for op in ops]
    assert any("spill_stores" in metadata for metadata in stored)
