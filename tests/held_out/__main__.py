"""Execute kernels of other packages, compare with their references, and print what is supported and found.

    python -m tests.held_out [--target sm_90] [--case NAME] [--write bench/results/held_out.md]

The packages are installed from PyPI into .venv-held-out, without their dependencies; torch and triton are ours.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("liger-kernel==0.8.5", "fla-core==0.6.0", "flash-linear-attention==0.6.0", "einops")
ENVIRONMENT = Path(".venv-held-out")
TOLERANCE = 5e-3  # of the largest value: float32 matmuls are in tf32


@dataclass
class Outcome:
    """What one case did."""

    name: str
    kernels: set[str] = field(default_factory=set)
    error: float = 0.0  # relative, the largest
    found: list[str] = field(default_factory=list)
    unsupported: str = ""

    @property
    def right(self) -> bool:
        return not self.unsupported and self.error <= TOLERANCE


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.held_out", description=__doc__)
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--write", type=Path, help="also write the table to a file")
    options = parser.parse_args()
    _install()
    from tests.held_out.cases import CASES

    torch.set_num_threads(1)
    outcomes = []
    for name in CASES:
        if options.case in name:
            outcomes.append(_execute(name, options.target))
            print(_row(outcomes[-1]), flush=True)
    summary = _summary(outcomes, options.target)
    print(summary)
    if options.write:
        head = "# Kernels of other packages, executed\n\nWritten by `python -m tests.held_out --write`.\n"
        columns = "| op | kernels | error | found |\n|---|---|---|---|"
        options.write.write_text("\n".join([head, summary, "", columns, *map(_row, outcomes), ""]))
    return 0 if all(outcome.right for outcome in outcomes) else 1


def _install() -> None:
    """Make the packages importable here."""
    if not (ENVIRONMENT / ".installed").exists():
        venv.create(ENVIRONMENT, with_pip=True)
        install = [
            str(ENVIRONMENT / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "-c",
            "constraints.txt",
        ]
        subprocess.run([*install, *PACKAGES], check=True)
        (ENVIRONMENT / ".installed").touch()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sys.path.insert(0, str((ENVIRONMENT / "lib" / version / "site-packages").resolve()))
    importlib.import_module("fla.ops")  # outside of execute: it asks for its device when it is imported


def _execute(name: str, target: str) -> Outcome:
    from fasttrain_kernels.testing import Fault, execute
    from tests.held_out.cases import CASES

    held, outcome = CASES[name], Outcome(name)

    def results(function: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return _outputs_and_gradients(function, held.inputs())

    def run(**options: Any) -> dict[str, torch.Tensor]:
        with execute(target, bank_conflicts=False, **options) as launches:
            got = results(held.op)
        outcome.kernels |= {launch.kernel for launch in launches}
        outcome.found += [text for text in launches.findings if text not in outcome.found]
        return got

    try:
        try:
            got = run()
        except Fault as fault:
            outcome.found.append(_short(str(fault)))
            got = run(races=False)
            others = [run(races=False, schedule=schedule) for schedule in ("forward", "reverse")]
            same = all(torch.equal(got[key], other[key]) for other in others for key in got)
            outcome.found.append("the bits are the same under every schedule" if same else "SCHEDULES GIVE OTHER BITS")
    except Exception as error:  # the survey continues, and reports it
        outcome.unsupported = _short(f"{type(error).__name__}: {error}")
        return outcome
    expected = results(held.reference)
    for key, value in expected.items():
        scale = max(value.abs().max().item(), 1e-30)
        outcome.error = max(outcome.error, (got[key].double() - value.double()).abs().max().item() / scale)
    return outcome


def _outputs_and_gradients(function: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = function(**inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    wanted = {name: x for name, x in inputs.items() if x.requires_grad}
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    if wanted:
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
        grads = torch.autograd.grad(outputs, list(wanted.values()), upstream)
        found |= {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return found


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:220]


def _row(outcome: Outcome) -> str:
    kernels = ", ".join(sorted(outcome.kernels))
    error = f"{outcome.error:.0e}" + ("" if outcome.right else " WRONG")
    findings = f"{'; '.join(map(_short, outcome.found[:3]))}" + (" ..." if len(outcome.found) > 3 else "")
    return f"| {outcome.name} | {kernels} | {outcome.unsupported or error} | {findings} |"


def _summary(outcomes: list[Outcome], target: str) -> str:
    kernels = {kernel for outcome in outcomes for kernel in outcome.kernels}
    right, failed = sum(o.right for o in outcomes), sum(bool(o.unsupported) for o in outcomes)
    return (
        f"{target}: {len(kernels)} kernels of {len(outcomes)} ops; {right} within {TOLERANCE:.1%} of their references, "
        f"{failed} not executed, {sum(bool(o.found) for o in outcomes)} with findings."
    )


if __name__ == "__main__":
    sys.exit(main())
