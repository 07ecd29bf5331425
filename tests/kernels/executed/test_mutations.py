"""Do the checks bite? Barriers, waits, fences, guards and swizzles of compiled kernels, removed one at a time.

Each mutant ends in a report (a Fault, a finding, numbers out of tolerance), or is redundant: under every schedule its
results are those of the unchanged kernel, bit for bit. How many are redundant is counted per kind; a check that stops
working raises the count.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fasttrain_kernels import attention, rms_norm
from fasttrain_kernels.testing import Fault, Unsupported, execute
from fasttrain_kernels.testing.accuracy import _outputs_and_gradients
from fasttrain_kernels.testing.executed import machine
from fasttrain_kernels.testing.executed.ptx import PtxInstruction

Rewrite = Callable[[str], str]


def removed(line: str) -> str:
    return ""


def unguarded(line: str) -> str:
    return re.sub(r"@!?%p\d+ ", "", line)


def unswizzled(line: str) -> str:
    """xor.b32 a, b, c: a = b."""
    return re.sub(r"xor\.b32\s+(%r\d+), (%r\d+), [^;]+;", r"mov.b32 \1, \2;", line)


KINDS: dict[str, tuple[str, Rewrite]] = {  # opcodes of the instructions, and what becomes of their line
    "barrier": (r"bar\.sync", removed),
    "wait": (r"cp\.async\.wait_group|wgmma\.wait_group|tcgen05\.wait::ld", removed),
    "fence": (r"fence\.proxy\.async", removed),
    "guard": (r"(ld|st)\.global|cp\.async\.c|tcgen05\.mma", unguarded),
    "swizzle": (r"xor\.b32", unswizzled),
}
SCHEDULES: list[dict[str, Any]] = [
    {},
    dict(schedule="reverse", asynchronous="early", poison=0xFF),
    dict(schedule="random"),
]


def norm():
    torch.manual_seed(0)
    return rms_norm, dict(x=torch.randn(5, 1000).bfloat16().requires_grad_(), weight=torch.randn(1000).bfloat16())


def causal():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 150, 1, 64).bfloat16().requires_grad_() for _ in "qkv")
    return attention, dict(q=q, k=k, v=v)


def run(case, target: str, **options) -> tuple[dict[str, torch.Tensor], list[str]]:
    op, inputs = case()
    with execute(target, bank_conflicts=False, multiprocessors=2, **options) as launches:
        results = _outputs_and_gradients(op, inputs, 0)
    return results, launches.findings


def executed(case, target: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[PtxInstruction]]:
    """The instructions of each kernel that were executed."""
    found: dict[str, dict[int, PtxInstruction]] = defaultdict(dict)
    launch = machine.Machine.launch

    def spy(self, grid, params):
        report = launch(self, grid, params)
        kernel = self.program.kernel
        for instruction, count in zip(kernel.code, self.counts, strict=True):
            if count:
                found[kernel.name][instruction.line] = instruction
        return report

    with monkeypatch.context() as patched:
        patched.setattr(machine.Machine, "launch", spy)
        run(case, target)
    return {kernel: [lines[line] for line in sorted(lines)] for kernel, lines in found.items()}


def mutate(kernel: str, line: int, change: Rewrite) -> Rewrite:
    def rewrite(text: str) -> str:
        if f".entry {kernel}(" not in text:
            return text
        lines = text.split("\n")
        lines[line - 1] = change(lines[line - 1])
        return "\n".join(lines)

    return rewrite


def outcome(case, target: str, rewrite: Rewrite, expected: dict[str, torch.Tensor], before: list[str]) -> str:
    """What tells a mutant from the kernel, or "redundant"."""
    for options in SCHEDULES:
        try:
            results, findings = run(case, target, rewrite=rewrite, **options)
        except (Fault, Unsupported):
            return "fault"
        except (IndexError, ValueError):  # of an address that is nowhere
            return "fault"
        if findings != before:
            return "finding"
        if any(not torch.equal(results[name], expected[name]) for name in expected):
            return "numbers"
    return "redundant"


def survey(case, target: str, monkeypatch: pytest.MonkeyPatch, *, every: int = 1) -> dict[str, Counter[str]]:
    expected, before = run(case, target)
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for kernel, instructions in executed(case, target, monkeypatch).items():
        for kind, (pattern, change) in KINDS.items():
            matching = [i for i in instructions if re.match(pattern, i.opcode) and (kind != "guard" or i.guard)]
            for instruction in matching[::every]:
                rewrite = mutate(kernel, instruction.line, change)
                table[kind][outcome(case, target, rewrite, expected, before)] += 1
    return table


# Of the mutants that no check and no number tells from the kernel, with their reason:
#   barrier   Triton puts one between two uses of an allocation, also where a warp only meets its own data again
#   wait      of a group that a later wait covers before its data are read
#   fence     one of several between a write and a matmul
#   guard     every lane is inside: the shapes leave no row out, or the block's loads stay in the tensor
#   swizzle   of an address that nobody uses, or of a register that holds 0
NORM = {"barrier": 2, "guard": 6}
ATTENTION = {"barrier": 0.6, "wait": 0.4, "fence": 0.8, "guard": 0.4, "swizzle": 0.4}  # largest share


@pytest.mark.executed
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_every_mutant_of_a_norm_is_reported_or_redundant(target, monkeypatch):
    table = survey(norm, target, monkeypatch)
    assert table["barrier"].total() >= 16
    assert table["guard"].total() >= 100
    for kind, outcomes in table.items():
        assert outcomes["redundant"] <= NORM.get(kind, 0), table


@pytest.mark.executed
@pytest.mark.parametrize(("target", "every"), [("sm_80", 8), ("sm_90", 6), ("sm_100", 8)])
def test_mutants_of_attention_are_reported_or_redundant(target, every, monkeypatch):
    table = survey(causal, target, monkeypatch, every=every)
    kinds = set(KINDS) - ({"fence"} if target == "sm_80" else set())  # which needs none
    assert kinds <= set(table)
    for kind, outcomes in table.items():
        assert outcomes["redundant"] <= ATTENTION[kind] * outcomes.total(), table
