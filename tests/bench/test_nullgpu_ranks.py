"""Several ranks on the null GPU: collectives are counted by kind and bytes."""

import json
import subprocess
import sys

import pytest

from bench.nullgpu.__main__ import ENVIRONMENT

pytestmark = [
    pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="there is no null GPU (make nullgpu)"),
    pytest.mark.slow,
]

LAYERS, WIDTH, ACCUMULATION = 3, 64, 2
SHARDED = f"""
import os, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ranks = int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
shape, names = ((ranks,), ("shard",)) if ranks == 2 else ((2, ranks // 2), ("replicate", "shard"))
options = dict(mesh=init_device_mesh("cuda", shape, mesh_dim_names=names),
               mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))
        self.head = nn.Linear({WIDTH}, {WIDTH}, bias=False)
    def forward(self, x):
        for layer in self.layers: x = layer(x)
        return self.head(x)
model = Root().cuda()
for layer in model.layers: fully_shard(layer, **options)
fully_shard(model, **options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    for micro in range({ACCUMULATION}):
        model.set_requires_gradient_sync(micro == {ACCUMULATION} - 1)
        model(torch.zeros(8, {WIDTH}, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def last_steps(tmp_path, ranks, *program):
    """What each rank asked for in its last step."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.nullgpu", "--ranks", str(ranks), "--json", str(figures), *program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("of the median one") == 1  # rank 0 alone prints
    files = [figures, *(figures.with_name(f"figures.json.{rank}") for rank in range(1, ranks))]
    return [json.loads(file.read_text())["counts"][-1] for file in files]


def collectives(counted):
    return {name: count for name, count in counted.items() if name.startswith("nccl") and count}


def test_fsdp_of_two_ranks_moves_what_theory_says(tmp_path):
    """bf16 gathered in each forward, and again in each backward but for the root; fp32 scattered once."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    block = WIDTH * WIDTH  # weights
    for counted in last_steps(tmp_path, 2, str(tmp_path / "sharded.py")):
        assert collectives(counted) == {
            "nccl:all_gather": ACCUMULATION * (2 * LAYERS + 1),
            "nccl bytes:all_gather": ACCUMULATION * 2 * (2 * LAYERS + 1) * block,
            "nccl:reduce_scatter": LAYERS + 1,
            "nccl bytes:reduce_scatter": 4 * (LAYERS + 1) * block,
        }
        assert counted.get("copies d2d", 0) == 0


def test_hsdp_of_four_ranks_splits_communicators(tmp_path):
    """Two shards, two replicas: what is scattered is the whole gradient, what is reduced its half."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    whole = (LAYERS + 1) * WIDTH * WIDTH
    for counted in last_steps(tmp_path, 4, str(tmp_path / "sharded.py")):
        moved = collectives(counted)
        assert moved["nccl bytes:reduce_scatter"] == 4 * whole
        assert moved["nccl bytes:all_reduce"] == 4 * whole // 2
        assert moved["nccl:all_reduce"] == LAYERS + 1
