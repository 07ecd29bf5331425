"""The output head and its loss, forward and backward on CPU, against plain PyTorch.

Runs are interleaved within one process (time) or each has a process of its own (memory), so that only ratios of the
same run are compared. Time is CPU time of one thread, which a busy machine disturbs least: several threads spin while
they wait for one that was suspended. Memory is what the process's resident set grows by at its peak, the two gradients
included.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.figures import memory, ratio, seconds
from fasttrain_kernels import linear_cross_entropy

TOKENS, HIDDEN, VOCABULARY = 4096, 768, 50_304
TIMED_TOKENS = 2048  # half: the share is the same, in half the time
ROUNDS = 2
TIME_LIMIT = 1.0  # of plain PyTorch
MEMORY_LIMIT = 1 / 8


def plain(hidden, weight, target):
    return F.cross_entropy(hidden @ weight.t(), target)


IMPLEMENTATIONS = {"plain": plain, "fasttrain": linear_cross_entropy}  # others are in bench/kernels


def problem(tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul_(0.02).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (tokens,), generator=generator)


def step(implementation, inputs):
    for tensor in inputs:
        tensor.grad = None
    loss = implementation(*inputs)
    loss.backward()
    return loss


def test_linear_cross_entropy_takes_no_longer_than_plain(report, one_thread):
    inputs = problem(TIMED_TOKENS)
    taken: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    losses, gradients = {}, {}
    for _ in range(ROUNDS):
        for name, implementation in IMPLEMENTATIONS.items():
            start = time.process_time()
            losses[name] = step(implementation, inputs).detach()
            taken[name].append(time.process_time() - start)
            gradients[name] = inputs[1].grad
    torch.testing.assert_close(losses["fasttrain"], losses["plain"])  # no speed without the right answer
    torch.testing.assert_close(gradients["fasttrain"], gradients["plain"], rtol=1e-4, atol=1e-7)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times, taken["plain"], strict=False))
        for name, times in taken.items()
    }
    report(
        f"linear_cross_entropy_time: {TIMED_TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCABULARY}, float32, CPU",
        {n: {"CPU": seconds(statistics.median(taken[n])), "of plain": _gated(n, ratios[n], TIME_LIMIT)} for n in taken},
    )


def test_linear_cross_entropy_needs_an_eighth_of_the_memory(report):
    processes = {name: _new_process(name) for name in IMPLEMENTATIONS}  # at the same time: none is timed
    extra = {name: int(process.communicate()[0]) for name, process in processes.items()}
    report(
        f"linear_cross_entropy_memory: {TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCABULARY}, float32, CPU",
        {n: {"peak": memory(b), "of plain": _gated(n, b / extra["plain"], MEMORY_LIMIT)} for n, b in extra.items()},
    )


def _gated(name, share, most):
    return ratio(share, at_most=most) if name == "fasttrain" else ratio(share, margin=None)


def _new_process(name):
    """Start a process that prints its peak."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, __file__, name], env=environment, stdout=subprocess.PIPE)


def _peak_of_one_step(name):
    implementation = IMPLEMENTATIONS[name]
    step(implementation, problem(tokens=8))  # loads libraries, starts threads
    inputs = problem()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    step(implementation, inputs)
    return _status("VmHWM") - before


def _status(field):
    kilobytes = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert kilobytes is not None
    return int(kilobytes[1]) * 1024


if __name__ == "__main__":
    print(_peak_of_one_step(sys.argv[1]))
