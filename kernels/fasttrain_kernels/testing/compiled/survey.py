"""Compile the shipped cases for a target: one row for each kernel that a case launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fasttrain_kernels.testing.compile_cases import CompileCase, Reach
from fasttrain_kernels.testing.compiled.metadata import KernelMetadata
from fasttrain_kernels.testing.compiled.recording import RecordedLaunch, record
from fasttrain_kernels.testing.specs import COMPILED


@dataclass(frozen=True)
class Row:
    """A kernel that a case launches, with its metadata, or the error that the case ended in."""

    target: str
    op: str
    case: str
    kernel: str = ""
    binary: str = ""  # rows with the same one share the binary
    metadata: KernelMetadata | None = None
    error: str = ""

    @property
    def key(self) -> str:
        return f"{self.case}: {self.kernel}"


def survey(target: str, op: str, *, quick: bool = False) -> list[Row]:
    """Compile all launches of an op's cases for one target; `quick` skips the cases that Reach names."""
    recorded: list[tuple[CompileCase, Sequence[RecordedLaunch], str]] = []
    with record(target) as launches:
        for case in COMPILED[op]:
            if not _wanted(case, target, quick):
                continue
            first, error = len(launches), ""
            try:
                case.run()
            except Exception as failure:  # the survey continues, and reports it
                error = f"{type(failure).__name__}: {failure}"
            recorded.append((case, launches[first:], error))
    rows = []
    for case, launched, error in recorded:
        for name, launch in _distinct(launched).items():
            rows.append(Row(target, op, case.name, name, launch.key, launch.metadata))
        if error:
            rows.append(Row(target, op, case.name, error=error))
    return rows


def _wanted(case: CompileCase, target: str, quick: bool) -> bool:
    if case.reach is Reach.TILES:
        return not quick or target == "sm_90"
    return case.reach is Reach.CORE or (target == "sm_90" and not quick)


def _distinct(launched: Sequence[RecordedLaunch]) -> dict[str, RecordedLaunch]:
    """The first launch of each binary by kernel name, numbered where a case runs a kernel in two specialisations."""
    first: dict[str, RecordedLaunch] = {}
    for launch in launched:
        first.setdefault(launch.key, launch)
    named: dict[str, RecordedLaunch] = {}
    for launch in first.values():
        number = 1 + sum(other.kernel == launch.kernel for other in named.values())
        named[f"{launch.kernel}#{number}" if number > 1 else launch.kernel] = launch
    return named
