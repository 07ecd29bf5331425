"""The providers of kernels, and the survey of all of them in several processes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from bench.static.cases import OURS, StaticCase
from bench.static.survey import StaticRow, survey

_BASELINES = {
    "liger": ("liger_kernel", "liger-kernel"),
    "cut-cross-entropy": ("cut_cross_entropy", "cut-cross-entropy"),
}


def installed() -> list[str]:
    """The baselines that are installed."""
    return [name for name, (module, _) in _BASELINES.items() if importlib.util.find_spec(module)]


def version(provider: str) -> str:
    """The version of an installed provider: "cut-cross-entropy", or a variant, "cut-cross-entropy, fp32"."""
    name = provider.split(",")[0]
    return importlib.metadata.version(_BASELINES[name][1]) if name in _BASELINES else "this repository"


def all_cases() -> list[StaticCase]:
    """Our cases, and those of the installed baselines."""
    cases = list(OURS)
    if "liger" in installed():
        from bench.static.liger import LIGER

        cases += LIGER
    if "cut-cross-entropy" in installed():
        from bench.static.cce import CCE

        cases += CCE
    return cases


def survey_all(ops: Sequence[str], targets: Sequence[str], jobs: int) -> list[StaticRow]:
    """The rows of all cases of some ops."""
    numbers = [i for i, case in enumerate(all_cases()) if case.shape.op in ops]
    if jobs == 1:
        return [row for i in numbers for row in _survey_case(i, targets)]
    context = multiprocessing.get_context("spawn")  # a forked child of a process with torch's threads may hang
    with ProcessPoolExecutor(min(jobs, len(numbers)), mp_context=context) as pool:
        tasks = [pool.submit(_survey_case, i, targets) for i in numbers]
        return [row for task in tasks for row in task.result()]


def _survey_case(number: int, targets: Sequence[str]) -> list[StaticRow]:
    case = all_cases()[number]
    return [row for target in targets for row in survey(case, target)]
