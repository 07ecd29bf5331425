"""How far is an op from the truth, and is that as close as plain PyTorch gets in the same dtype?

The truth is the op's reference in float64. The allowance is not a constant but the error of eager PyTorch in the same
dtype:

    error(op) <= 2 * error(eager) + eps(dtype) * max|truth|

The last term is one rounding of the largest value, for outputs that eager happens to hit exactly. Gradients are taken
with non-uniform upstream gradients, the same for all three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FACTOR = 2.0


@dataclass(frozen=True)
class Comparison:
    """One output or gradient: its greatest absolute error, and the allowance."""

    name: str
    error: float
    eager_error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    def __str__(self) -> str:
        mark = "ok" if self.ok else "WRONG"
        return f"{self.name}: error {self.error:.3g}, eager {self.eager_error:.3g}, allowed {self.allowed:.3g}: {mark}"


def compare(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: dict[str, Any],  # tensors that require grad get their gradients compared; other values are passed on
    *,
    eager: Callable[..., Any] | None = None,  # default: the reference in the inputs' dtype
    seed: int = 0,
) -> list[Comparison]:
    """Outputs and gradients of `op` against `reference` in float64, each with eager's error as the measure."""
    truth = _outputs_and_gradients(reference, _as_double(inputs), seed)
    ours = _outputs_and_gradients(op, _fresh(inputs), seed)
    plain = _outputs_and_gradients(eager or reference, _fresh(inputs), seed)
    assert ours.keys() == truth.keys(), f"the op gives {', '.join(ours)}; the reference gives {', '.join(truth)}"
    return [_comparison(name, ours[name], plain[name], truth[name]) for name in truth]


def assert_accurate(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: dict[str, Any],
    *,
    eager: Callable[..., Any] | None = None,
    seed: int = 0,
) -> None:
    """Raise AssertionError with every output and gradient that is less accurate than `compare` allows."""
    wrong = [c for c in compare(op, reference, inputs, eager=eager, seed=seed) if not c.ok]
    assert not wrong, "; ".join(map(str, wrong))


def _comparison(name: str, ours: Tensor, plain: Tensor, truth: Tensor) -> Comparison:
    assert ours.shape == truth.shape, f"{name} has shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    assert ours.dtype == plain.dtype, f"{name} has dtype {ours.dtype}, expected {plain.dtype}"
    eager_error = _greatest(plain.double() - truth)
    eps = torch.finfo(ours.dtype).eps
    return Comparison(
        name=name,
        error=_greatest(ours.double() - truth),
        eager_error=eager_error,
        allowed=FACTOR * eager_error + eps * _greatest(truth),
    )


def _greatest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0  # max propagates NaN


def _outputs_and_gradients(function: Callable[..., Any], inputs: dict[str, Any], seed: int) -> dict[str, Tensor]:
    result = function(**inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    named = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    wanted = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad}
    differentiable = [output for output in outputs if output.requires_grad]
    if not wanted or not differentiable:
        return named
    generator = torch.Generator().manual_seed(seed)
    grads = torch.autograd.grad(
        differentiable, list(wanted.values()), [_upstream(o, generator) for o in differentiable]
    )
    return named | {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def _upstream(output: Tensor, generator: torch.Generator) -> Tensor:
    """Values that every dtype holds exactly, so that all three functions get the same."""
    return (torch.randn(output.shape, generator=generator) * 16).round().div(16).to(output)


def _fresh(inputs: dict[str, Any]) -> dict[str, Any]:
    return {n: v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def _as_double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        n: v.detach().double().requires_grad_(v.requires_grad) if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in inputs.items()
    }
