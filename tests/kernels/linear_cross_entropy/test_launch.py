"""Launches of the kernel: bytes moved."""

import pytest
import torch

from fasttrain_kernels import linear_cross_entropy
from fasttrain_kernels.testing import interpret
from tests.kernels.linear_cross_entropy.problems import (
    problem,
)


@pytest.mark.parametrize("V", [50_304, 50_257])
def test_kernel_moves_each_logit_twice_in_and_once_out(V):
    """The limit is one read and one write; the second read finds its row in L2, so unique bytes are at the limit."""
    inputs = problem(4, 8, V, torch.bfloat16, ignored=False)
    with interpret() as launches:
        linear_cross_entropy(**inputs).backward()
    limit = 4 * V * 2 * 2
    assert launches.moved <= 1.501 * limit
    assert launches[0].unique <= 1.05 * limit
