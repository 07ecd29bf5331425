"""The greatest sum of bytes that torch had allocated at a time, beyond what was there before."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

_SECOND = "the second run"


def peak_on_cpu(run: Callable[[], Any]) -> int:
    """The peak of the second of two runs, from the profiler's record of every allocation: the same number each time.

    What the first run leaves behind and the second frees, as gradients, is counted as there before.
    """
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        run()  # the profiler misses what is freed but was not allocated before it
        with torch.profiler.record_function(_SECOND):  # its begin is of the profiler's own clock
            run()
    events = profile.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == _SECOND)
    sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = highest = 0
    for _, size in sorted((e for e in sizes if e[0] >= begin), key=operator.itemgetter(0)):
        held += size
        highest = max(highest, held)
    return highest


def peak_on_gpu(run: Callable[[], Any]) -> int:
    """The peak that torch's caching allocator counts, rounded up by it to 512 bytes."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    return peak_on_gpu(run) if device == "cuda" else peak_on_cpu(run)
