"""Checks of bench.static that take longer than those in tests/."""

import pytest

from bench.static.cases import OURS
from tests.bench.test_static import compare_with_direct_run


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("attention", dict(T=640, Hq=4, Hk=1, D=128, SMS=9)),
        ("qk_norm_rope", dict(M=60, Hq=16, Hk=8, D=128, SMS=5)),
    ],
)
def test_extrapolated_counts_equal_those_of_a_direct_run(op, sizes):
    compare_with_direct_run(next(case for case in OURS if case.shape.op == op), sizes)
