"""The examples for other trainers run, learn, and compute what plain torch computes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fasttrain_kernels import attention_reference, linear_cross_entropy_reference, relu2_reference

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nanogpt_learns_as_plain_torch_does(monkeypatch):
    example = load("nanogpt")
    losses = example.main()
    assert losses[-1] < 0.5 * losses[0]
    monkeypatch.setattr(example, "attention", attention_reference)
    monkeypatch.setattr(example, "linear_cross_entropy", linear_cross_entropy_reference)
    monkeypatch.setattr(example, "relu2", relu2_reference)
    torch.testing.assert_close(torch.tensor(losses[:10]), torch.tensor(example.main(10)), rtol=1e-4, atol=0)


def test_the_trainer_of_transformers_learns_the_same_with_kernels():
    pytest.importorskip("accelerate")
    example = load("huggingface_trainer")
    losses = example.main()
    assert losses[-1] < 0.5 * losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(example.main(kernels=False)), rtol=1e-3, atol=0)


def test_torchtitans_model_learns_as_plain_torch_does():
    example = load("torchtitan_model")
    losses = example.main(compiled=False)
    assert losses[-1] < 0.7 * losses[0]
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64)
    model, tokens = example.Transformer(**sizes), torch.arange(66).view(2, 33) % 64
    got = model(tokens[:, :-1], tokens[:, 1:])
    x = model.tok_embeddings(tokens[:, :-1])
    angles = torch.outer(torch.arange(32.0), 500_000.0 ** (-torch.arange(0, 16, 2) / 16))
    for block in model.layers.values():
        norm = F.rms_norm(x, (64,), block.attention_norm.weight, 1e-5)
        attention = block.attention
        q, k, v = (w(norm).unflatten(-1, (-1, 16)).transpose(1, 2) for w in (attention.wq, attention.wk, attention.wv))
        q, k = (torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
                for a, b in (y.chunk(2, -1) for y in (q, k)))  # fmt: skip
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        x = x + attention.wo(out.flatten(-2))
        norm, ffn = F.rms_norm(x, (64,), block.ffn_norm.weight, 1e-5), block.feed_forward
        x = x + ffn.w2(F.silu(ffn.w1(norm)) * ffn.w3(norm))
    logits = F.linear(F.rms_norm(x, (64,), model.norm.weight, 1e-5), model.output.linear.weight)
    torch.testing.assert_close(got, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


@pytest.mark.slow
def test_torchtitans_model_is_sharded_and_compiled():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, EXAMPLES / "torchtitan_model.py"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss:") == 2
