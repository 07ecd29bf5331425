"""A covering part of the survey, against the rules and the stored figures."""

import json
from pathlib import Path

import pytest
import triton

from fasttrain_kernels.testing.compiled import rules
from fasttrain_kernels.testing.compiled.survey import survey
from fasttrain_kernels.testing.specs import COMPILED
from fasttrain_kernels.testing.targets import TARGETS

STORED = Path(__file__).parents[4] / "bench" / "results" / "compiled.json"


@pytest.mark.skipif(
    json.loads(STORED.read_text())["triton"] != triton.__version__, reason="tiles are chosen for another triton's code"
)
@pytest.mark.parametrize("op", COMPILED)
@pytest.mark.parametrize("target", TARGETS)
def test_shipped_kernels_compile_without_spills_and_no_worse_than_before(target, op):
    """A covering part of the survey; `python -m fasttrain_kernels.testing.compiled` does all of it."""
    rows = survey(target, op, quick=True)
    found = [f"{row.key}: {problem}" for row in rows for problem in rules.problems(row)]
    assert not found, "\n".join(found)
    _, figures = rules.read(STORED)
    update = f"python -m fasttrain_kernels.testing.compiled --stored {STORED} --op {op} --update"
    for row in rows:
        stored = rules.stored_metadata(row, figures)
        assert stored is not None, f"{row.key} has no stored figures: {update}"
        worse = rules.regressions(row, stored)
        assert not worse, f"{row.key}: {'; '.join(worse)}. If it is meant to be: {update}"
