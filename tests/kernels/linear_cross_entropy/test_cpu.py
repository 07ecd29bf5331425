"""The CPU implementation: float64, autocast, and wrong targets."""

import torch

from fasttrain_kernels import linear_cross_entropy, linear_cross_entropy_reference
from tests.kernels.linear_cross_entropy.problems import (
    gradients,
    problem,
)


def test_cpu_implementation_in_float64():
    inputs = problem(4, 3, 7, torch.float64, z_loss=0.1, label_smoothing=0.1, softcap=3.0)
    for a, b in zip(
        *(gradients(f, inputs) for f in (linear_cross_entropy, linear_cross_entropy_reference)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    hidden, weight = inputs.pop("hidden"), inputs.pop("weight")  # "none", as gradcheck calls backward twice
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, reduction="none", **inputs), (hidden, weight)
    )


def test_autocast_does_not_reach_the_matmuls_of_the_cpu_implementation():
    inputs = problem(6, 16, 40)
    inputs["hidden"].data = inputs["hidden"].data.bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(linear_cross_entropy, inputs)
    outside = gradients(linear_cross_entropy, inputs)
    torch.testing.assert_close(inside[2], outside[2])
