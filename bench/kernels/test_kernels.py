"""Every op, forward (without gradients) and forward+backward, against eager, compiled and fused baselines.

    python -m pytest bench/kernels -p no:xdist -k rms_norm

The implementations of a case are compared at once (bench/kernels/comparison.py); each has a test, which hands its
seconds to pytest-benchmark. An implementation that fails its check is not timed: its test fails, and no speed exists.
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

import pytest
import torch

from bench.figures import exact, memory, rate, ratio, seconds
from bench.kernels.baselines import EAGER, OURS, OURS_COMPILED, implementations
from bench.kernels.comparison import BOTH, FORWARD, SHORT, KernelCase, Outcome, cases, compare_all
from bench.kernels.limits import limits
from bench.kernels.ops import OPS
from bench.kernels.timing import Replay
from fasttrain.distributed.runtime import keep_freed_memory

MARGIN = 0.25  # of a ratio, from run to run: a kernel takes milliseconds, and medians of seven rounds differ by 10%
CLOCK = Replay()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of eager's time on a CPU; linear_cross_entropy has its limit in a file of its own. Forward alone, of half a
# millisecond, is as much the call of a compiled function as it is the kernel.
MAX_OF_EAGER = {(op, OURS_COMPILED, BOTH): 1.0 for op in OPS if OPS[op].streaming}
MAX_OF_EAGER["linear", OURS, BOTH] = 1.1  # it is torch's own matmul on some machines, and up to 5 % faster on others


@cache
def compared(case: KernelCase) -> dict[str, Outcome]:
    keep_freed_memory()  # as the trainer does, for all implementations
    return compare_all(case, implementations(case.op, case.device))


def _tests() -> list[Any]:
    return [
        pytest.param(case, passes, name, id=f"{case.name} {passes} {name}".replace(" ", "-"))
        for case in cases(DEVICE)
        for passes in (FORWARD, BOTH)
        for name in implementations(case.op, DEVICE)
    ]


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize(("case", "passes", "name"), _tests())
def test_kernel(case: KernelCase, passes: str, name: str, benchmark: Any, report: Any, one_thread: None) -> None:
    benchmark.group = f"{case.name}, {passes}"
    if reason := implementations(case.op, DEVICE)[name].missing(DEVICE, case.dtype):
        pytest.skip(reason)
    outcomes = compared(case)
    publish(case, passes, name, outcomes, benchmark, report)


def publish(
    case: KernelCase, passes: str, name: str, outcomes: dict[str, Outcome], benchmark: Any, report: Any
) -> None:
    """Report one implementation's figures, if it passed its check."""
    outcome, eager = outcomes[name], outcomes[EAGER]
    assert not outcome.failure, f"{name} failed its check, and was not timed: {outcome.failure}"
    times = outcome.seconds[passes]
    CLOCK.load(times)
    benchmark.pedantic(lambda: None, rounds=len(times), iterations=1)
    work, most = case.work(passes), limits(case.device, case.dtype)
    median = statistics.median(times)
    bound = most.bound(work)
    amount, unit = (work.bytes / 1e9, "GB/s") if bound == "memory" else (work.flops / 1e12, "TFLOP/s")
    of_eager = statistics.median(a / b for a, b in zip(times, eager.seconds[passes], strict=True))
    ours, gates = name in (OURS, OURS_COMPILED), case.device == "cpu"
    figures = {
        "time": seconds(median),
        "of eager": ratio(
            of_eager,
            at_most=MAX_OF_EAGER.get((case.op, name, passes)) if gates else None,
            margin=MARGIN if ours else None,
        ),
        "rate": rate(amount / median, unit),
        "of the limit": most.seconds(work) / median,
        "peak": exact(outcome.peak[passes], "B") if ours and gates else memory(outcome.peak[passes]),
    }
    about = {
        "op": case.op, "pass": passes, "size": case.sizes, "dtype": SHORT[case.dtype], "bound": bound,
        "bytes": work.bytes, "flops": work.flops, "bandwidth": most.bandwidth, "peak_flops": most.flops,
    }  # fmt: skip
    benchmark.extra_info |= about | {key: getattr(f, "value", f) for key, f in figures.items()}
    report(f"{case.op} {case.shape} {SHORT[case.dtype]} {passes}", {name: figures}, about=about)
