"""Compiled kernels with one instruction changed, and what tells each from the kernel.

A launch of an op is recorded with its arguments. A mutant runs that launch alone, under several schedules.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttrain_kernels.testing import Fault, Unsupported, execute
from fasttrain_kernels.testing.executed import context, machine
from fasttrain_kernels.testing.executed.launches import ExecutedLaunch
from fasttrain_kernels.testing.executed.machine import ExecutionOptions
from fasttrain_kernels.testing.executed.program import ExecutableKernel
from fasttrain_kernels.testing.executed.ptx import Operand, PtxInstruction

NOTHING = "griddepcontrol.wait"  # an instruction that does nothing here
Change = Callable[[PtxInstruction], PtxInstruction]


def _removed(instruction: PtxInstruction) -> PtxInstruction:
    return replace(instruction, opcode=NOTHING, operands=(), guard=None)


def _not_awaited(instruction: PtxInstruction) -> PtxInstruction:
    """An mbarrier answers that its phase is complete."""
    if not instruction.opcode.startswith("mbarrier"):
        return _removed(instruction)
    true = Operand("immediate", "1", value=1)
    return replace(instruction, opcode="mov.pred", operands=(instruction.operands[0], true))


def _unguarded(instruction: PtxInstruction) -> PtxInstruction:
    return replace(instruction, guard=None)


def _unswizzled(instruction: PtxInstruction) -> PtxInstruction:
    """xor a, b, c: a = b."""
    return replace(instruction, opcode="mov.b32", operands=instruction.operands[:2])


# wgmma.fence is not among them: without it, ptxas orders the registers itself, and says so.
KINDS: dict[str, tuple[str, Change]] = {  # opcodes of the instructions, and what becomes of them
    "barrier": (r"bar(rier)?\.sync", _removed),
    "wait": (r"cp\.async\.wait_group|wgmma\.wait_group|tcgen05\.wait::|mbarrier\.try_wait", _not_awaited),
    "fence": (r"fence\.proxy\.async", _removed),
    "guard": (r"(ld|st)\.global|cp\.async\.c|red|atom|tcgen05\.mma|tcgen05\.commit|mbarrier\.(init|inval)", _unguarded),
    "swizzle": (r"xor\.b32", _unswizzled),
}
SCHEDULES: list[dict[str, Any]] = [
    {},
    dict(schedule="reverse", early=True, shared_poison=0xFF),
    dict(schedule="random"),
    dict(schedule="forward", first_wins=True),
]


@dataclass
class RecordedExecution:
    """A launch: what it was given, what it made of that, and how often it executed each instruction."""

    program: ExecutableKernel
    rest: tuple[Any, ...]  # grid, arguments, shared memory
    given: list[Tensor]  # its tensors before, and after
    results: list[Tensor]
    report: ExecutedLaunch
    counts: list[int]

    def run(self, program: ExecutableKernel, options: ExecutionOptions) -> tuple[list[Tensor], ExecutedLaunch]:
        grid, arguments, shared = self.rest
        copies = iter([tensor.clone() for tensor in self.given])
        fresh = [(kind, next(copies) if isinstance(value, Tensor) else value) for kind, value in arguments]
        report = context.execute_kernel(program, grid, fresh, shared, options)
        return [value for _, value in fresh if isinstance(value, Tensor)], report


def recorded(run: Callable[[], Any], target: str, monkeypatch: pytest.MonkeyPatch) -> list[RecordedExecution]:
    """The first launch of each kernel."""
    found: dict[str, RecordedExecution] = {}
    counts: list[int] = []
    launch, run_machine = context.execute_kernel, machine.Machine.launch

    def counting(self, grid, params):
        report = run_machine(self, grid, params)
        counts[:] = self.counts.tolist()
        return report

    def spy(program, grid, arguments, shared, options, *rest):
        given = [value.clone() for _, value in arguments if isinstance(value, Tensor)]
        assert all(value.is_contiguous() for _, value in arguments if isinstance(value, Tensor))
        report = launch(program, grid, arguments, shared, options, *rest)
        results = [value.clone() for _, value in arguments if isinstance(value, Tensor)]
        execution = RecordedExecution(program, (grid, arguments, shared), given, results, report, list(counts))
        found.setdefault(program.kernel.name, execution)
        return report

    with monkeypatch.context() as patched:
        patched.setattr(context, "execute_kernel", spy)
        patched.setattr(machine.Machine, "launch", counting)
        with execute(target, multiprocessors=2):
            run()
    return list(found.values())


def mutants(execution: RecordedExecution) -> Iterator[tuple[str, PtxInstruction, ExecutableKernel]]:
    """Kind, instruction, and the kernel without it; of instructions that were executed."""
    program = execution.program
    for at, instruction in enumerate(program.kernel.code):
        for kind, (pattern, change) in KINDS.items():
            matches = re.match(pattern, instruction.opcode) and (kind != "guard" or instruction.guard)
            if matches and execution.counts[at]:
                yield kind, instruction, program.replaced(at, change(instruction))


def outcome(execution: RecordedExecution, mutant: ExecutableKernel, *, swizzle: bool) -> str:
    """What tells a mutant from the kernel; or "redundant": the same bits and findings under every schedule."""
    before = execution.report
    for number, schedule in enumerate(SCHEDULES):
        conflicts = swizzle and number == 0
        try:
            results, report = execution.run(mutant, ExecutionOptions(bank_conflicts=conflicts, **schedule))
        except (Fault, Unsupported, IndexError, ValueError):  # the last two: of an address that is nowhere
            return "fault"
        if report.findings != before.findings:
            return "finding"
        if any(not torch.equal(_bits(now), _bits(then)) for now, then in zip(results, execution.results, strict=True)):
            return "numbers"
        if conflicts and report.bank_conflicts > before.bank_conflicts:
            return "bank conflicts"
    return "redundant"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def survey(execution: RecordedExecution) -> dict[str, Counter[str]]:
    """How many mutants of each kind end how."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, _, mutant in mutants(execution):
        table[kind][outcome(execution, mutant, swizzle=kind == "swizzle")] += 1
    return dict(table)
