"""Eight short runs that between them pass through every part of the trainer, and what is kept of each.

A refactoring leaves all of it bit-for-bit equal. What is kept depends on torch, on the CPU and on the compiler of the
C++ kernels, so each recording has a key that names them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from fasttrain.data.batches import Batch, Batches
from fasttrain.train import main
from fasttrain_kernels import cpp
from tests.datasets import DatasetWriter
from tests.faults.processes import Training
from tests.ranks import run_ranks
from tests.runs import weights

RECORDED = Path(__file__).with_name("recorded")
WORDS = 60  # of the vocabulary, beside the separator
STEPS = 40
TIMED = {"low MFU", "slow-down", "speed"}  # kinds of events that depend on the speed of the machine

MODEL = [
    *("--model.layers", "2", "--model.hidden", "32", "--model.heads", "4", "--model.kv_heads", "2"),
    *("--model.head_dim", "8", "--model.ffn", "48"),
]
COMMON = [
    *("--data.sequence", "32", "--batch.sequences", "8", "--batch.micro", "2", "--batch.steps", str(STEPS)),
    *("--optim.warmup", "5", "--optim.lr", "2e-3", "--checkpoint.every", "10", "--checkpoint.background", "False"),
    *("--validation.every", "20", "--validation.sequences", "7", "--validation.sample", "w1 w2"),
    *("--validation.sample_tokens", "3", "--parallel.compile", "off", "--monitor.slowdown", "0", "--data.lint", "off"),
    *("--log.tensorboard", "False", "--log.report", "False", "--log.every", "50"),
]
SPIKE = [  # longer: a spike is told from noise, of which a run has to see some first
    *("--batch.steps", "90", "--monitor.first", "64", "--checkpoint.every", "20", "--checkpoint.keep_last", "9"),
    *("--validation.every", "0"),
]


@dataclass(frozen=True, kw_only=True)
class GoldenRun:
    """What is trained, and how."""

    options: tuple[str, ...] = ()
    ranks: int = 1
    data: str = "path"  # path, mixture or from_hf
    train: Callable[[Path, list[str], int], int] | None = None  # in place of a plain run; returns the exit code


def _kill_and_resume(out: Path, argv: list[str], ranks: int) -> int:
    """SIGKILL in the middle of step 26; the same command again."""
    with Training(out, fault=_killed_in_backward, world=ranks, argv=argv) as training:
        assert training.ends(60) == -signal.SIGKILL
    with Training(out, world=ranks, argv=argv) as training:
        return training.ends(60)


def _killed_in_backward() -> None:
    backward, calls = torch.Tensor.backward, 0

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4 * 25 + 2:  # four micro-batches a step
            os.kill(os.getpid(), signal.SIGKILL)
        backward(tensor, *args, **options)

    torch.Tensor.backward = counted  # type: ignore[assignment]


def _with_poisoned_batches(_: Path, argv: list[str], ranks: int) -> int:
    """Noise in place of the targets at some places of the data; a skip passes over them."""
    at = Batches.at

    def noisy(batches: Batches, step: int) -> Batch:
        batch = at(batches, step)
        if batches._first_sample(step) // batches._sequences in range(70, 75):
            noise = torch.randint(WORDS, batch.targets.shape, generator=torch.Generator().manual_seed(step))
            return replace(batch, targets=noise)
        return batch

    with patch.object(Batches, "at", noisy):
        return main(argv)


RUNS = {
    "adamw": GoldenRun(options=("--model.dropout", "0.1", "--optim.z_loss", "1e-4")),
    "muon, 2 ranks": GoldenRun(options=("--optim.kind", "muon"), ranks=2),
    "bf16": GoldenRun(options=("--parallel.precision", "bf16")),
    "mixture, 2 ranks, recompute": GoldenRun(options=("--parallel.recompute", "selective"), ranks=2, data="mixture"),
    "muon in bf16, recompute": GoldenRun(
        options=("--optim.kind", "muon", "--parallel.precision", "bf16", "--parallel.recompute", "selective")
    ),
    "from_hf": GoldenRun(options=("--optim.schedule", "wsd"), data="from_hf"),
    "spike and rollback": GoldenRun(options=tuple(SPIKE), train=_with_poisoned_batches),
    "kill and resume": GoldenRun(options=("--optim.kind", "muon"), train=_kill_and_resume),
}


def golden(name: str, directory: Path) -> dict[str, Any]:
    """Train, and return what is kept of the run."""
    run, out = RUNS[name], directory / "run"
    argv = [*(MODEL if run.data != "from_hf" else []), *COMMON, *_data(run.data, directory)]
    argv += ["--out", str(out), *run.options]
    torch.set_num_threads(1)
    if run.train:
        code = run.train(out, argv, run.ranks)
    elif run.ranks > 1:
        run_ranks(_finish, run.ranks, argv)
        code = 0
    else:
        code = main(argv)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line)["kind"] for line in (out / "events.jsonl").read_text().splitlines()]
    validations = [json.loads(line) for line in (out / "validation.jsonl").read_text().splitlines()]
    return {
        "exit code": code,
        "events": [kind for kind in events if kind not in TIMED],
        "steps": [[line["step"], float(line["loss"]).hex(), float(line["grad_norm"]).hex()] for line in steps],
        "validations": [[line["step"], line["set"], float(line["loss"]).hex()] for line in validations],
        "tensors": {key: _sha256(value) for key, value in sorted(weights(out).items())},
    }


def key() -> str:
    """What decides about bits: torch, the CPU, the compiler of the C++ kernels, and where its matmul is used."""
    found = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    vendor = match[1] if (match := re.search(r"vendor_id\s*: (\w+)", found)) else platform.machine()
    compiler = shutil.which("g++")
    version = subprocess.check_output([compiler, "-dumpversion"], text=True).strip() if compiler else "none"
    capability = torch.backends.cpu.get_cpu_capability()
    _, matmuls = cpp.faster_matmuls() or (0, 0)
    return f"torch-{torch.__version__}_{vendor}-{capability}_g++-{version}_matmuls-{matmuls}"


def _finish(argv: list[str]) -> None:
    assert main(argv) == 0


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _data(kind: str, directory: Path) -> list[str]:
    a = _dataset(directory / "a", seed=1)
    if kind == "mixture":
        b = _dataset(directory / "b", seed=2)
        weights = ["--data.mixture.a.weight", "3", "--data.mixture.b.epochs", "0.5"]
        return ["--data.mixture.a.path", str(a), "--data.mixture.b.path", str(b), *weights]
    start = ["--from_hf", str(_pretrained(directory / "pretrained"))] if kind == "from_hf" else []
    return ["--data.path", str(a), *start]


def _dataset(path: Path, *, seed: int) -> Path:
    """Documents of words, each of which makes the next one likely; a fifth is held out."""
    known = {"<|end|>": 0, **{f"w{number}": number for number in range(1, WORDS + 1)}}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    draw = np.random.default_rng(seed)
    options: dict[str, Any] = dict(tokenizer=tokenizer.to_str(), vocab=WORDS + 1, separator=0, source="a test")
    with DatasetWriter(path, **options) as writer:
        for number in range(1500):
            steps = draw.integers(1, 4, draw.integers(5, 40))
            ids = (draw.integers(WORDS) + np.cumsum(steps)) % WORDS + 1
            writer.add("validation" if number % 5 == 0 else "train", ids, num_bytes=3 * len(ids))
    return path


def _pretrained(path: Path) -> Path:
    """A Hugging Face checkpoint of Qwen3's shape with random weights."""
    hidden, heads, kv, dim, ffn, layers, vocab = 32, 4, 2, 8, 48, 2, 64
    draw = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (heads * dim, hidden),
            f"{at}.self_attn.k_proj.weight": (kv * dim, hidden),
            f"{at}.self_attn.v_proj.weight": (kv * dim, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * dim),
            f"{at}.mlp.gate_proj.weight": (ffn, hidden),
            f"{at}.mlp.up_proj.weight": (ffn, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, ffn),
        }
    tensors = {name: (draw.standard_normal(shape) * 0.1).astype(np.float32) for name, shape in shapes.items()}
    norms = {"model.norm.weight": hidden}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        norms |= {f"{at}.{norm}.weight": hidden for norm in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"{at}.self_attn.{norm}.weight": dim for norm in ("q_norm", "k_norm")}
    tensors |= {name: draw.uniform(0.5, 1.5, size).astype(np.float32) for name, size in norms.items()}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    config = dict(
        model_type="qwen3", architectures=["Qwen3ForCausalLM"], num_attention_heads=heads, hidden_size=hidden,
        head_dim=dim, num_hidden_layers=layers, num_key_value_heads=kv, intermediate_size=ffn, vocab_size=vocab,
        rms_norm_eps=1e-6, rope_theta=10_000.0, tie_word_embeddings=True,
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path
