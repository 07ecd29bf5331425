"""The check of an implementation before it is timed, on the very inputs that it is timed on.

Our ops have the tolerance of fasttrain_kernels.testing.accuracy: outputs and gradients are at most twice as far from
the truth as eager PyTorch in the same dtype, and one rounding. Baselines may sum in any order: they are within the
square root of the dtype's epsilon, of the largest value. The truth is the reference in float64, or in float32 for
16-bit inputs whose float64 would not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels.testing.accuracy import FACTOR, Comparison

MAX_FLOAT64_ELEMENTS = 2**28

Results = dict[str, Tensor]


def call(function: Callable[..., Any], inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    result = function(**inputs)
    return result if isinstance(result, tuple) else (result,)


def results(function: Callable[..., Any], inputs: dict[str, Any], upstream: tuple[Tensor, ...]) -> Results:
    """Outputs and gradients, by name."""
    outputs = call(function, inputs)
    wanted = differentiable(inputs)
    grads = torch.autograd.grad(outputs, list(wanted.values()), upstream)
    named = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    return named | {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def differentiable(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}


def upstream_of(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Non-uniform upstream gradients, of values that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(1)
    return tuple((torch.randn(o.shape, generator=generator) * 16).round().div(16).to(o) for o in outputs)


def truth_dtype(dtype: torch.dtype, elements: int) -> torch.dtype | None:
    """The dtype of the truth; None where no dtype is wide enough and fits."""
    if elements <= MAX_FLOAT64_ELEMENTS:
        return torch.float64
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else None


def truth(
    reference: Callable[..., Any], inputs: dict[str, Any], upstream: tuple[Tensor, ...], dtype: torch.dtype
) -> Results:
    def wide(x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if floating else x

    return results(reference, {n: wide(x) for n, x in inputs.items()}, tuple(wide(x) for x in upstream))


def failures(found: Results, eager: Results, truth: Results, *, ours: bool) -> str:
    """Name every output and gradient that is out of tolerance; "" if none is."""
    assert found.keys() == truth.keys()
    compared = [_compared(name, found[name], eager[name], true, ours) for name, true in truth.items()]
    return "; ".join(str(one) for one in compared if not one.ok)


def _compared(name: str, found: Tensor, eager: Tensor, true: Tensor, ours: bool) -> Comparison:
    error, eager_error = ((x.to(true.dtype) - true).abs().max().item() for x in (found, eager))  # max keeps NaN
    eps, largest = max(torch.finfo(x.dtype).eps for x in (found, eager)), true.abs().max().item()
    tolerance = FACTOR * eager_error + eps * largest if ours else eps**0.5 * largest
    return Comparison(name=name, error=error, eager_error=eager_error, tolerance=tolerance)
