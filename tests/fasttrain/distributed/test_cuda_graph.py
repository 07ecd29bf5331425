"""A step as a CUDA graph: who may have one, and, on the null GPU where it was built, what is captured and replayed."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.nullgpu.__main__ import ENVIRONMENT
from fasttrain.config import ParallelConfig
from fasttrain.data.batches import Batch
from fasttrain.distributed.cuda_graph import make_graph


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (dict(device="cpu"), "the device is cpu"),
        (dict(world_size=2), "there are 2 ranks"),
        (dict(precision="fp16"), "fp16 decides on the host whether a step counts"),
        (dict(device="cpu", world_size=4), "the device is cpu and there are 4 ranks"),
    ],
)
def test_who_cannot_have_one_is_told(given, why):
    runtime: Any = SimpleNamespace(**{"device": "cuda", "world_size": 1, "precision": "bf16"} | given)
    runtime.device = torch.device(runtime.device)
    with pytest.raises(
        ValueError, match=f"^parallel.cuda_graph needs one GPU and bf16 or fp32, and {why}; set it to f"
    ):
        make_graph(ParallelConfig(cuda_graph=True), runtime)
    assert make_graph(ParallelConfig(), runtime) is None


def test_batches_of_one_shape_hold_the_same_documents():
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    cu_seqlens, none = torch.tensor([0, 5, 6, 12], dtype=torch.int32), np.zeros(2, dtype=np.int64)
    batch = Batch(components=none, samples=none, tokens=tokens, targets=tokens, positions=None, cu_seqlens=cu_seqlens)
    padded = batch.pad_documents()
    assert padded.cu_seqlens.tolist() == [0, 5, 6, *[12] * 10]
    assert padded.tokens is tokens
    assert batch.pad_documents().pad_documents().cu_seqlens.tolist() == padded.cu_seqlens.tolist()


REPLAYS = """
import torch
from bench.nullgpu.program import Device
from fasttrain.distributed.cuda_graph import StepGraph

device, graph, calls = Device(), StepGraph(torch.device("cuda", 0)), []
weight = [torch.ones(8, device="cuda")]
def work(x, nothing):
    calls.append(nothing)
    weight[0].mul_(2)
    return weight[0] + x

def step():
    before = device.counters()
    graph(work, [torch.ones(8).pin_memory(), None], weight)
    after = device.counters()
    names = "launches", "graph launches", "launches in graphs"
    return {name: after.get(name, 0) - before.get(name, 0) for name in names}

print([(*step().values(), len(calls)) for _ in range(5)])
weight[0] = torch.ones(8, device="cuda")  # another address, as after a rollback
print([(*step().values(), len(calls)) for _ in range(4)])
"""


@pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="there is no null GPU (make nullgpu)")
def test_two_steps_are_eager_one_is_captured_and_others_are_launches_of_the_graph(tmp_path):
    program = tmp_path / "replays.py"
    program.write_text(REPLAYS)
    done = subprocess.run([sys.executable, "-m", "bench.nullgpu", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, after = done.stdout.splitlines()
    eager, replay = (2, 0, 0), (0, 1, 2)
    assert first == str([(*eager, 1), (*eager, 2), (*replay, 3), (*replay, 3), (*replay, 3)])
    assert after == str([(*eager, 4), (*eager, 5), (*replay, 6), (*replay, 6)])
