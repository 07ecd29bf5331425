"""One op at one size: every implementation is checked, its memory measured; interleaved runs time those that pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.kernels import check
from bench.kernels.baselines import OURS, OpImplementation
from bench.kernels.ops import OPS
from bench.kernels.timing import Run, measure
from bench.memory import peak_bytes
from fasttrain_kernels.testing.specs import OpSpec, OpWork, Size

FORWARD, BOTH = "forward", "forward+backward"
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """An op, a size, a dtype and a device."""

    op: str
    size: tuple[tuple[str, int], ...]  # letters and numbers, as a key
    dtype: torch.dtype
    device: str

    @property
    def sizes(self) -> Size:
        return dict(self.size)

    @property
    def shape(self) -> str:
        return " ".join(f"{letter}{number}" for letter, number in self.size)

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {SHORT[self.dtype]}"

    def work(self, passes: str) -> OpWork:
        forward, backward = OPS[self.op].work(self.sizes, self.dtype.itemsize)
        return forward if passes == FORWARD else forward + backward


@dataclass(frozen=True)
class Outcome:
    """The results of one implementation; without figures where its check failed."""

    failure: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by passes
    peak: dict[str, int] = field(default_factory=dict)


def cases(device: str) -> list[KernelCase]:
    """All cases for this device: on a CPU float32 only, as it is slow at 16-bit matmuls."""
    dtypes = (torch.bfloat16, torch.float32) if device == "cuda" else (torch.float32,)
    return [
        KernelCase(op=op.name, size=tuple(size.items()), dtype=dtype, device=device)
        for op in OPS.values()
        for size in (op.gpu if device == "cuda" else op.cpu)
        for dtype in dtypes
        if check.truth_dtype(dtype, op.elements(size))
    ]


def compare_all(case: KernelCase, implementations: dict[str, OpImplementation]) -> dict[str, Outcome]:
    """Check and measure all implementations that can run here."""
    torch.compiler.reset()  # compiled for this size alone, and within dynamo's limit of sizes
    op = OPS[case.op]
    inputs = inputs_of(case)
    upstream = check.upstream_of(check.call(op.eager, inputs))
    functions = {name: one.make() for name, one in implementations.items() if not one.missing(case.device, case.dtype)}
    failures = _check_all(op, case, functions, inputs, upstream)
    passed = {name: function for name, function in functions.items() if not failures[name]}
    runs = {FORWARD: {}, BOTH: {}}  # type: dict[str, dict[str, Run]]
    for name, function in passed.items():
        runs[FORWARD][name], runs[BOTH][name] = runs_of(function, inputs, upstream)
    peak = {p: {name: peak_bytes(run, case.device) for name, run in of.items()} for p, of in runs.items()}
    seconds = {passes: measure(of, case.device) for passes, of in runs.items()}
    return {
        name: Outcome(failures[name])
        if failures[name]
        else Outcome("", {p: seconds[p][name] for p in runs}, {p: peak[p][name] for p in runs})
        for name in functions
    }


def _check_all(
    op: OpSpec,
    case: KernelCase,
    functions: dict[str, Callable[..., Any]],
    inputs: dict[str, Any],
    upstream: tuple[Tensor, ...],
) -> dict[str, str]:
    wide = check.truth_dtype(case.dtype, op.elements(case.sizes))
    assert wide is not None
    truth = check.truth(op.reference, inputs, upstream, wide)
    eager = check.results(op.eager, inputs, upstream)
    return {
        name: check.failures(check.results(function, inputs, upstream), eager, truth, ours=name == OURS)
        for name, function in functions.items()
    }


def runs_of(function: Callable[..., Any], inputs: dict[str, Any], upstream: tuple[Tensor, ...]) -> tuple[Run, Run]:
    wanted = list(check.differentiable(inputs).values())

    def forward() -> None:
        with torch.no_grad():
            function(**inputs)

    def both() -> None:
        torch.autograd.grad(check.call(function, inputs), wanted, upstream)

    return forward, both


def inputs_of(case: KernelCase) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.device, case.dtype).requires_grad_()

    return OPS[case.op].inputs(case.sizes, randn)
