"""Inputs of linear_cross_entropy, and checks of its results."""

import contextlib
from typing import Any

import pytest
import torch

from fasttrain_kernels import linear_cross_entropy, linear_cross_entropy_reference
from fasttrain_kernels.testing import assert_accurate, assert_accurate_over_seeds, interpret
from tests.kernels.numbers import eager
from tests.kernels.numbers.cases import in_four_orders

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS: dict[str, Any] = {"triton": interpret, "cpu": contextlib.nullcontext}
both_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
OPTIONS: list[dict[str, Any]] = [
    dict(),
    dict(z_loss=0.1),
    dict(label_smoothing=0.2),
    dict(softcap=5.0),
    dict(token_weight=True),
    dict(z_loss=0.01, label_smoothing=0.1, softcap=8.0, token_weight=True, ignore_index=3),
]


def problem(M, H, V, dtype=torch.float32, *, ignored=True, spread=3.0, **options):
    """Inputs by name. spread is the logits' standard deviation: 3 makes some p close to 1."""
    tokens = M if isinstance(M, tuple) else (M,)
    target = torch.randint(V, tokens)
    if ignored and target.numel() > 2:
        target.view(-1)[1::5] = options.get("ignore_index", -100)
    if options.get("token_weight"):
        options["token_weight"] = torch.randint(1, 9, tokens) / 8
    return dict(
        hidden=torch.randn(*tokens, H).to(dtype).requires_grad_(),
        weight=(torch.randn(V, H) * spread / H**0.5).to(dtype).requires_grad_(),
        target=target,
        **options,
    )


def gradients(function, inputs, upstream=None):
    inputs = {k: v.detach().requires_grad_(v.requires_grad) if torch.is_tensor(v) else v for k, v in inputs.items()}
    loss = function(**inputs)
    wanted = [inputs[name] for name in ("hidden", "weight") if inputs[name].requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, wanted, upstream)


def check(inputs):
    assert_accurate(linear_cross_entropy, linear_cross_entropy_reference, inputs, eager=eager.linear_cross_entropy)


def check_over_seeds(*shape, **options):
    """Check problem(*shape, **options): with few tokens in float32, a single seed may be one rounding, or none."""
    assert_accurate_over_seeds(
        linear_cross_entropy,
        linear_cross_entropy_reference,
        lambda: problem(*shape, **options),
        seeds=range(8),
        eager=in_four_orders(eager.linear_cross_entropy),
    )
