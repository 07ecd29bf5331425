"""Execute kernels of other packages, compare with their references, and print what is supported and found.

    python -m tests.held_out [--target sm_90 ...] [--case NAME] [--tutorials DIR] [--write bench/results/held_out.md]

The packages are installed from PyPI into .venv-held-out, without their dependencies; torch and triton are ours.
Triton's tutorials are in no package: --tutorials names python/tutorials of a checkout.
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


@dataclass
class Outcome:
    """What one case did."""

    name: str
    kernels: set[str] = field(default_factory=set)
    error: float = 0.0  # relative, the largest
    found: list[str] = field(default_factory=list)
    unsupported: str = ""
    tolerance: float = 0.0
    wrong: str = ""  # a defect of the kernel's, which its error has to show

    @property
    def right(self) -> bool:
        return not self.unsupported and (self.error <= self.tolerance) != bool(self.wrong)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.held_out", description=__doc__)
    parser.add_argument("--target", nargs="+", default=["sm_90"])
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--tutorials", type=Path, metavar="DIR", help="python/tutorials of a checkout of Triton")
    parser.add_argument("--write", type=Path, help="also write the table to a file")
    options = parser.parse_args()
    _install()
    from tests.held_out.cases import CASES
    from tests.held_out.tutorials import add_tutorials, as_if_on

    torch.set_num_threads(1)
    if options.tutorials:
        add_tutorials(options.tutorials)
    sections = ["# Kernels of other packages, executed\n\nWritten by `python -m tests.held_out --write`."]
    everything = []
    for target in options.target:
        as_if_on(target)
        outcomes = []
        for name in CASES:
            if options.case in name:
                outcomes.append(_execute(name, target))
                print(_row(outcomes[-1]), flush=True)
        summary = _summary(outcomes, target)
        print(summary)
        columns = "| op | kernels | error | found |\n|---|---|---|---|"
        sections.append("\n".join([f"\n## {target}\n", summary, "", columns, *map(_row, outcomes)]))
        everything += outcomes
    if options.write:
        options.write.write_text("\n".join([*sections, ""]))
    return 0 if all(outcome.right for outcome in everything) else 1


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

    held = CASES[name]
    outcome = Outcome(name, tolerance=held.tolerance, wrong=held.wrong)

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
        compiled = "PassManager" not in str(error)  # Triton's own error, which says no more
        outcome.unsupported = _short(f"{type(error).__name__}: {error}") if compiled else "not compiled by Triton"
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
    error = f"{outcome.error:.0e}" + ("" if outcome.error <= outcome.tolerance else " WRONG")
    found = [*([outcome.wrong] if outcome.wrong else []), *outcome.found]
    findings = f"{'; '.join(map(_short, found[:3]))}" + (" ..." if len(found) > 3 else "")
    return f"| {outcome.name} | {kernels} | {outcome.unsupported or error} | {findings} |"


def _summary(outcomes: list[Outcome], target: str) -> str:
    kernels = {kernel for outcome in outcomes for kernel in outcome.kernels}
    right, failed = sum(o.right and not o.wrong for o in outcomes), sum(bool(o.unsupported) for o in outcomes)
    return (
        f"{len(kernels)} kernels of {len(outcomes)} ops; {right} agree with their references, {failed} not executed, "
        f"{sum(bool(o.found or o.wrong) for o in outcomes)} with findings."
    )


if __name__ == "__main__":
    sys.exit(main())
