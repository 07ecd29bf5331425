"""The error of an op against the truth, with the error of eager PyTorch in the same dtype as tolerance.

The truth is the op's reference in float64. The tolerance is not a constant but calibrates itself:

    error(op) <= 2 * error(eager) + eps(dtype) * max|truth|

The last term is one rounding of the largest value, for outputs that eager happens to hit exactly. Gradients are taken
with non-uniform upstream gradients, the same for all three.

An error is the max over a tensor, and where one rounding decides it, eager may be lucky: against itself, with its sums
in another order, it would often fail. Over many seeds luck averages out, and no rounding has to be added. Two means
over seeds must both be within twice eager's:

    root mean square of the errors      sees a seed that is far worse than the others; one such seed hides those
    geometric mean of error / eager's   sees what most seeds have in common; hides one bad seed

In the second, errors below half a unit in the last place of the largest value count as that: no rounded result has
less. The max error over all seeds would be one rounding of one seed, and a mean over elements would forgive a
bad row in a thousand. Several eager implementations, which differ in their order of summation, are more samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

FACTOR = 2.0


@dataclass(frozen=True)
class Comparison:
    """One output or gradient: its max absolute error, and the tolerance."""

    name: str
    error: float
    eager_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        mark = "OK" if self.ok else "FAILED"
        return (
            f"{self.name}: error {self.error:.3g}, eager {self.eager_error:.3g}, tolerance {self.tolerance:.3g}: {mark}"
        )


@dataclass(frozen=True)
class ComparisonOverSeeds(Comparison):
    """Root mean squares over seeds, the geometric mean of their ratios, and the results of single seeds."""

    typical: float  # geometric mean over seeds of error / eager_error
    seeds: int
    failed_seeds: int  # seeds out of the tolerance of `compare` with the first eager implementation
    worst_seed: float  # the largest error of a seed, as a share of that tolerance

    @property
    def ratio(self) -> float:
        """The error in units of eager's: FACTOR is the limit."""
        return self.error / self.eager_error if self.eager_error else math.inf if self.error else 0.0

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance and self.typical <= FACTOR  # False for NaN

    def __str__(self) -> str:
        return f"{super().__str__()} (over {self.seeds} seeds; geometric mean {self.typical:.2f} times eager's)"


def compare(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: dict[str, Any],  # tensors that require grad get their gradients compared; other values are passed on
    *,
    eager: Callable[..., Any] | None = None,  # default: the reference in the inputs' dtype
    seed: int = 0,
) -> list[Comparison]:
    """Outputs and gradients of `op` against `reference` in float64, each with a tolerance from eager's error."""
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
    """Raise AssertionError with every output and gradient that is out of tolerance."""
    wrong = [c for c in compare(op, reference, inputs, eager=eager, seed=seed) if not c.ok]
    assert not wrong, "; ".join(map(str, wrong))


def compare_over_seeds(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Callable[[], dict[str, Any]],  # drawn from torch's generator, anew for each seed
    *,
    seeds: Iterable[int],
    eager: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,  # one, or several orders of summation
) -> list[ComparisonOverSeeds]:
    """Compare over all seeds together, with twice eager's error as tolerance and nothing added."""
    eagers = [reference] if eager is None else [eager] if callable(eager) else list(eager)
    results: dict[str, list[_Seed]] = {}
    for seed in seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = inputs()
        truth = _outputs_and_gradients(reference, _as_double(drawn), seed)
        ours = _outputs_and_gradients(op, _fresh(drawn), seed)
        plain = [_outputs_and_gradients(function, _fresh(drawn), seed) for function in eagers]
        assert ours.keys() == truth.keys(), f"the op gives {', '.join(ours)}; the reference gives {', '.join(truth)}"
        for name in truth:
            against = [_comparison(name, ours[name], one[name], truth[name]) for one in plain]
            eager_error = _root_mean_square([alone.eager_error for alone in against])
            results.setdefault(name, []).append(_Seed(against[0], eager_error, _floor(ours[name], truth[name])))
    return [_over_seeds(name, of_seeds) for name, of_seeds in results.items()]


def assert_accurate_over_seeds(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Callable[[], dict[str, Any]],
    *,
    seeds: Iterable[int],
    eager: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
) -> None:
    """Raise AssertionError with every output and gradient that is out of tolerance over the seeds."""
    wrong = [c for c in compare_over_seeds(op, reference, inputs, seeds=seeds, eager=eager) if not c.ok]
    assert not wrong, "; ".join(map(str, wrong))


class _Seed(NamedTuple):
    alone: Comparison
    eager_error: float  # of all eager implementations
    floor: float

    @property
    def ratio(self) -> float:
        error, eager_error = (max(e, self.floor) for e in (self.alone.error, self.eager_error))
        return error / eager_error if eager_error else math.inf if error else 1.0


def _over_seeds(name: str, seeds: list[_Seed]) -> ComparisonOverSeeds:
    eager_error = _root_mean_square([seed.eager_error for seed in seeds])
    alone = [seed.alone for seed in seeds]
    return ComparisonOverSeeds(
        name=name,
        error=_root_mean_square([one.error for one in alone]),
        eager_error=eager_error,
        tolerance=FACTOR * eager_error,
        typical=math.prod(seed.ratio ** (1 / len(seeds)) for seed in seeds),
        seeds=len(seeds),
        failed_seeds=sum(not one.ok for one in alone),
        worst_seed=max(one.error / one.tolerance if one.tolerance else 0.0 for one in alone),
    )


def _root_mean_square(errors: list[float]) -> float:
    return math.sqrt(math.fsum(error * error for error in errors) / len(errors))


def _floor(ours: Tensor, truth: Tensor) -> float:
    """Half a unit in the last place of the largest value."""
    return torch.finfo(ours.dtype).eps / 2 * _max_abs(truth) if ours.is_floating_point() else 0.0


def _comparison(name: str, ours: Tensor, plain: Tensor, truth: Tensor) -> Comparison:
    assert ours.shape == truth.shape, f"{name} has shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    assert ours.dtype == plain.dtype, f"{name} has dtype {ours.dtype}, expected {plain.dtype}"
    eager_error = _max_abs(plain.double() - truth.double())
    eps = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
    return Comparison(
        name=name,
        error=_max_abs(ours.double() - truth.double()),
        eager_error=eager_error,
        tolerance=FACTOR * eager_error + eps * _max_abs(truth),
    )


def _max_abs(x: Tensor) -> float:
    return x.double().abs().max().item() if x.numel() else 0.0  # max propagates NaN


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
