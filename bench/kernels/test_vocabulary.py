"""Memory of the head against the vocabulary: what linear_cross_entropy is for.

Bytes that torch has allocated at a time beyond the inputs, in forward+backward; the gradients are among them. On a CPU
they are exact.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.figures import exact, memory, ratio
from bench.kernels import check
from bench.kernels.baselines import EAGER, OURS, implementations
from bench.kernels.comparison import KernelCase, inputs_of, runs_of
from bench.kernels.ops import OPS
from bench.memory import peak_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HIDDEN, DTYPE = (8192, 2048, torch.bfloat16) if DEVICE == "cuda" else (1024, 256, torch.float32)
VOCABULARIES = (8192, 32000, 50304, 128256, 262144) if DEVICE == "cuda" else (4096, 8192, 16384, 32768)
BASELINES = ("torch", "Liger", "cut-cross-entropy")


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_memory_over_vocabulary(vocab: int, report: Any) -> None:
    size = dict(M=TOKENS, C=HIDDEN, V=vocab)
    case = KernelCase(op="linear_cross_entropy", size=tuple(size.items()), dtype=DTYPE, device=DEVICE)
    available = implementations(case.op, DEVICE)
    functions = {n: available[n].make() for n in (OURS, EAGER, *BASELINES) if not available[n].missing(DEVICE, DTYPE)}
    inputs = inputs_of(case)
    eager = check.results(OPS[case.op].eager, inputs, upstream := (torch.ones((), device=DEVICE),))
    peaks = {}
    for name, function in functions.items():
        failure = check.failures(check.results(function, inputs, upstream), eager, eager, ours=False)
        assert not failure, f"{name} failed its check, and has no memory figure: {failure}"
        peaks[name] = peak_bytes(runs_of(function, inputs, upstream)[1], DEVICE)
    figures = {
        name: {
            "peak": exact(peak, "B") if name == OURS and DEVICE == "cpu" else memory(peak),
            "of eager": ratio(peak / peaks[EAGER], margin=None),
        }
        for name, peak in peaks.items()
    }
    about = {"op": case.op, "pass": "memory", "size": size, "dtype": str(DTYPE).removeprefix("torch.")}
    report(f"linear_cross_entropy memory {case.shape}: forward+backward", figures, about=about)
