"""What a step asks of the host and of a GPU, on the null GPU where it was built (make nullgpu)."""

import json
import subprocess
import sys

import pytest

from bench.nullgpu.__main__ import ENVIRONMENT

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
