"""A GPU whose memory is full, at each stage of a run: one line with a remedy, no traceback."""

from __future__ import annotations

import pytest

# 537 MB of weights, 269 MB of bf16 copies, 537 MB of gradients, 1.07 GB of moments
SIZES = "--model.layers 8 --model.hidden 1024 --model.heads 8 --model.kv-heads 8 --model.head-dim 128 --model.ffn 4096"
PLACE = "--validation.every 0 --checkpoint.every 0 --data.lint off --parallel.compile off --parallel.device cuda"
LARGE = ["train", *SIZES.split(), *PLACE.split(), "--optim.warmup", "0"]
FEW = "--data.sequence 32 --batch.sequences 1 --batch.micro 1"
MANY = "--data.sequence 512 --batch.sequences 16 --batch.micro 16"


@pytest.mark.parametrize(
    ("gigabytes", "options"),
    [
        pytest.param(0.3, FEW, id="model"),
        pytest.param(1.2, MANY, id="forward"),
        pytest.param(1.05, FEW, id="backward"),
        pytest.param(1.7, FEW, id="optimizer state"),
    ],
)
def test_a_full_gpu_ends_a_run_with_a_remedy(run, data, tmp_path, gigabytes, options):
    place = ["--data.path", str(data), "--out", str(tmp_path / "run")]
    command = [*LARGE, "--batch.steps", "4", *options.split(), *place]
    [answer] = run([command], memory=gigabytes)
    assert "CUDA out of memory" in answer.text
    assert "Traceback" not in answer.text
    assert "lower batch.micro, set parallel.recompute" in answer.text
    assert answer.code == "2"


def test_a_full_gpu_ends_another_command_with_a_remedy(run, data, tmp_path):
    out = str(tmp_path / "run")
    train = [*LARGE, "--batch.steps", "1", *FEW.split(), "--data.path", str(data), "--out", out]
    [trained] = run([train])
    assert trained.code == "0", trained.text
    generate, evaluate = run(
        [["generate", out, "--prompt", "w1", "--device", "cuda"], ["eval", out, "--device", "cuda"]], memory=0.3
    )
    for answer in (generate, evaluate):
        assert "Traceback" not in answer.text, answer.text
        assert "CUDA out of memory" in answer.text
        assert "use --device cpu" in answer.text
        assert answer.code == "2"
