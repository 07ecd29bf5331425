"""The self-check: every op forward and backward against its reference, as a table.

    python -m fasttrain_kernels.testing.self_check

On a GPU the Triton kernels run there; without one, in the interpreter. CPU implementations are checked too. The exit
code is 1 if an op is out of tolerance (see fasttrain_kernels.testing.accuracy).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from fasttrain_kernels.testing.accuracy import Comparison, compare
from fasttrain_kernels.testing.specs import SPECS


@dataclass(frozen=True)
class SelfCheckCase:
    """One op with its inputs in the self-check."""

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    eager: Callable[..., Any]  # as one would write it in PyTorch: its error sets the tolerance
    inputs: Callable[[Callable[..., Tensor]], dict[str, Any]]  # from a maker of random tensors


CASES = [
    SelfCheckCase(spec.title, spec.function, spec.reference, spec.eager, partial(spec.inputs, spec.small))
    for spec in SPECS
    if spec.small
]


@dataclass(frozen=True)
class Implementation:
    """A way to run the ops: device, dtype, and the context around the call."""

    name: str
    device: str
    dtype: torch.dtype
    context: Callable[[], contextlib.AbstractContextManager[Any]]


def implementations() -> Iterator[Implementation]:
    """All implementations that this machine can run."""
    if not torch.cuda.is_available():
        from fasttrain_kernels.testing.interpreter import interpret

        yield Implementation("Triton", "cpu", torch.bfloat16, interpret)
        yield Implementation("Triton", "cpu", torch.float32, interpret)
    yield from training_implementations()


def training_implementations() -> Iterator[Implementation]:
    """The implementations that training uses here: nothing is interpreted, and no extra is needed."""
    if torch.cuda.is_available():
        for dtype in (torch.bfloat16, torch.float32):
            yield Implementation("Triton", "cuda", dtype, contextlib.nullcontext)
    yield Implementation("CPU", "cpu", torch.float32, contextlib.nullcontext)


def run(case: SelfCheckCase, implementation: Implementation) -> list[Comparison]:
    """Compare outputs and gradients of the op with its reference."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(implementation.device, implementation.dtype).requires_grad_()

    with implementation.context():
        return compare(case.op, case.reference, case.inputs(randn), eager=case.eager)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run every op forward and backward against its reference.")
    parser.add_argument("--op", action="append", metavar="NAME", help="only ops whose name contains NAME; repeatable")
    wanted = parser.parse_args(argv).op
    cases = [case for case in CASES if not wanted or any(name in case.name for name in wanted)]
    if not cases:
        parser.error(f"no op is called {', '.join(wanted)}; there are {', '.join(case.name for case in CASES)}")
    console = Console()
    table = Table(title="Max error (share of tolerance)", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in ("op", "impl", "dtype", "forward", "gradients", "result"):
        table.add_column(column, justify="right" if column in ("forward", "gradients") else "left", no_wrap=True)
    failed = 0
    pairs = [(case, implementation) for case in cases for implementation in implementations()]
    for i, (case, implementation) in enumerate(track(pairs, "comparing", console=console, transient=True)):
        results = run(case, implementation)
        failed += (ok := all(c.ok for c in results)) is False
        outputs = [c for c in results if c.name.startswith("output")]
        gradients = [c for c in results if c not in outputs]
        table.add_row(
            case.name if i == 0 or pairs[i - 1][0] is not case else "",
            implementation.name,
            _SHORT[implementation.dtype],
            _share(outputs),
            _share(gradients),
            "[green]OK" if ok else "[red]FAILED",
            end_section=i + 1 == len(pairs) or pairs[i + 1][0] is not case,
        )
    console.print(table)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreted on the CPU: there is no GPU"
    console.print(
        f"Triton kernels ({where}) and CPU implementations against their references in float64. The tolerance is twice "
        "the error of eager PyTorch in the same dtype, plus one rounding. "
        + ("[green]All ops OK." if not failed else f"[red]{failed} of {len(pairs)} comparisons failed.")
    )
    return 1 if failed else 0


_SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def _share(comparisons: list[Comparison]) -> str:
    worst = max(comparisons, key=lambda c: c.error / c.tolerance)
    return f"{worst.error:.0e} ({worst.error / worst.tolerance:4.0%})"


if __name__ == "__main__":
    sys.exit(main())
