"""What a step asks of the host and of a GPU, on the null GPU where it was built (make nullgpu)."""

import json
import subprocess
import sys

import pytest
import torch

from bench.nullgpu.__main__ import ENVIRONMENT
from fasttrain.config import ModelConfig
from fasttrain.model import Decoder

pytestmark = pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="there is no null GPU (make nullgpu)")

TRAIN = """--model.layers 2 --model.hidden 64 --model.heads 2 --model.kv-heads 2 --model.head-dim 32 --model.ffn 128
    --data.sequence 64 --batch.sequences 8 --batch.micro 4 --batch.steps 12 --optim.warmup 2 --validation.every 0
    --checkpoint.every 0"""


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_step_on_one_gpu_copies_no_weight_and_waits_for_the_step_before_alone(tmp_path, make_text, compiled):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.nullgpu", "--json", str(figures), "-m", "fasttrain.train", *TRAIN.split()]
    command += [
        "--parallel.compile",
        compiled,
        "--data.path",
        str(make_text(tmp_path / "data", documents=400)),
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert figures.exists(), done.stderr
    for counted in json.loads(figures.read_text())["counts"][6:]:
        assert counted.get("copies d2d", 0) == 0
        assert counted.get("copies h2d pageable", 0) == 0
        assert {name for name, count in counted.items() if name.startswith("sync:") and count} == {
            "sync:cudaEventSynchronize"  # of the step before: its figures, and its times
        }
        assert counted["sync:cudaEventSynchronize"] <= 2


@pytest.mark.slow
def test_fsdp_in_bf16_on_two_ranks_moves_what_theory_says(tmp_path, make_text):
    """All-gathers: bf16, in each forward, and again in each backward but the root's; reduce-scatters: fp32, once."""
    figures, accumulation = tmp_path / "figures.json", 2
    command = [sys.executable, "-m", "bench.nullgpu", "--ranks", "2", "--json", str(figures)]
    command += ["-m", "fasttrain.train", *TRAIN.split(), "--batch.sequences", str(2 * 4 * accumulation)]
    command += ["--parallel.compile", "off", "--parallel.precision", "bf16"]
    command += ["--data.path", str(make_text(tmp_path / "data", documents=400)), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    settings = ModelConfig(layers=2, hidden=64, heads=2, kv_heads=2, head_dim=32, ffn=128)
    with torch.device("meta"):
        model = Decoder(settings, vocab=64, sequence=64)
    whole, in_blocks = (sum(p.numel() for p in part.parameters()) for part in (model, model.blocks))
    for path in (figures, figures.with_name("figures.json.1")):
        counted = json.loads(path.read_text())["counts"][-1]
        assert counted["nccl:all_gather"] == accumulation * (2 * 2 + 1)
        assert counted["nccl bytes:all_gather"] == accumulation * 2 * (in_blocks + whole)
        assert counted["nccl:reduce_scatter"] == 2 + 1
        assert counted["nccl bytes:reduce_scatter"] == 4 * whole
        assert counted["nccl bytes:all_reduce"] < 100  # the loss, the number of tokens, the norm of the gradient
