"""`fasttrain train` on "cuda", to its end: the host's part of it, with kernels that compute nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.nullgpu.__main__ import ROOT
from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.cli.parse import load
from fasttrain.metrics.jsonl import read_metrics
from fasttrain.recipes import RECIPES
from fasttrain.tools.plan.speed import traffic, work_of
from tests.nullgpu.conftest import SECONDS

STEPS = 8
SMALL = f"""--model.layers 2 --model.hidden 64 --model.heads 2 --model.kv-heads 2 --model.head-dim 32 --model.ffn 128
    --data.sequence 64 --data.lint off --batch.sequences 8 --batch.micro 2 --batch.steps {STEPS} --optim.warmup 2
    --validation.every 4 --validation.sequences 4 --validation.sample-tokens 4 --checkpoint.every 4
    --parallel.device cuda --log.tensorboard False""".split()
EAGER = {
    "bf16": "",
    "fp32": "--parallel.precision fp32",
    "fp16": "--parallel.precision fp16",
    "selective recompute": "--parallel.recompute selective",
    "full recompute": "--parallel.recompute full",
    "no accumulation": "--batch.micro 8",
    "muon": "--optim.kind muon",
    "untied head": "--model.tied-head False",
    "z-loss": "--optim.z-loss 1e-4",
    "whole documents": "--data.document-mask False",
    "profile": "--profile",
    "cuda graph": "--parallel.cuda-graph True",
    "cuda graph, fp32": "--parallel.cuda-graph True --parallel.precision fp32 --model.dropout 0.1",
    "cuda graph, muon": "--parallel.cuda-graph True --optim.kind muon",
    "cuda graph, recompute": "--parallel.cuda-graph True --parallel.recompute full --data.document-mask False",
    "cuda graph, profile": "--parallel.cuda-graph True --profile",
}
COMPILED = {
    "compiled": "",
    "compiled, selective recompute": "--parallel.recompute selective",
    "compiled, full recompute": "--parallel.recompute full",
    "compiled, cuda graph": "--parallel.cuda-graph True",
    "compiled, muon, fp16": "--optim.kind muon --parallel.precision fp16",
}
SHARDED, HELD = "--parallel.dp-replicate 1", "--parallel.reshard-after-forward False"
SEVERAL = {
    "two ranks": "",
    "two ranks, fp16, muon": "--parallel.precision fp16 --optim.kind muon",
    "two ranks, fp32, full recompute": "--parallel.precision fp32 --parallel.recompute full --model.dropout 0.1",
    "two sharded ranks": SHARDED,
    "two sharded ranks, every reduction": f"{SHARDED} --parallel.grad-reduce every",
    "two sharded ranks, weights held": f"{SHARDED} {HELD} --parallel.recompute selective",
    "two sharded ranks, muon": f"{SHARDED} --optim.kind muon",
}
REPLICATED = {"two ranks, replicated": "--parallel.dp-replicate 2"}  # a process of its own: torch splits its group
SEVERAL_COMPILED = {"two ranks, compiled": "", "two sharded ranks, compiled": SHARDED}
# Several units of two blocks: 17M parameters each
COLLECTIVES = {
    "replicated": "",
    "replicated, fp32": "--parallel.precision fp32",
    "sharded": SHARDED,
    "sharded, every reduction": f"{SHARDED} --parallel.grad-reduce every",
    "sharded, weights held": f"{SHARDED} {HELD}",
}


def command(out: Path, data: Path, options: str, *, compiled: bool = False) -> list[str]:
    place = ["--data.path", str(data), "--out", str(out), "--parallel.compile", "on" if compiled else "off"]
    return ["train", *SMALL, *place, *options.split()]


class Runs:
    """Runs of one table, made when one of its tests asks first."""

    def __init__(self, run, root, data):
        self.run, self.root, self.data, self.answers = run, root, data, {}

    def __call__(self, cases, name, *, ranks=1, compiled=False):
        if name not in self.answers:
            commands = [command(self.root / case, self.data, cases[case], compiled=compiled) for case in cases]
            self.answers |= dict(zip(cases, self.run(commands, ranks=ranks), strict=True))
        return self.answers[name], self.root / name


@pytest.fixture(scope="module")
def runs(run, data, tmp_path_factory):
    return Runs(run, tmp_path_factory.mktemp("runs"), data)


def check(answer, out, ranks=1):
    assert "Traceback" not in answer.text, answer.text
    assert answer.code == "0", answer.text
    assert f"{ranks} rank{'s' * (ranks > 1)} on cuda" in answer.text
    assert f"finished: {STEPS} steps" in answer.text
    assert [line["step"] for line in read_metrics(out)] == list(range(1, STEPS + 1))
    assert [checkpoint.step for checkpoint in list_checkpoints(out / "checkpoints")] == [4, 8]


@pytest.mark.parametrize("name", EAGER)
def test_eager(runs, name):
    answer, out = runs(EAGER, name)
    check(answer, out)
    assert not (out / "profile").exists() or {path.suffix for path in (out / "profile").iterdir()} >= {".gz", ".pickle"}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(runs, name):
    answer, out = runs(COMPILED, name, compiled=True)
    check(answer, out)
    assert "blocks are compiled" in answer.text


@pytest.mark.parametrize("name", SEVERAL)
def test_two_ranks(runs, name):
    answer, out = runs(SEVERAL, name, ranks=2)
    check(answer, out, ranks=2)


@pytest.mark.parametrize("name", REPLICATED)
def test_two_replicas(runs, name):
    answer, out = runs(REPLICATED, name, ranks=2)
    check(answer, out, ranks=2)


@pytest.mark.parametrize("name", SEVERAL_COMPILED)
def test_two_ranks_compiled(runs, name):
    answer, out = runs(SEVERAL_COMPILED, name, ranks=2, compiled=True)
    check(answer, out, ranks=2)


def test_a_run_resumes_on_another_number_of_ranks(run, data, tmp_path):
    out = tmp_path / "run"
    [first] = run([command(out, data, "--batch.steps 4")])
    assert first.code == "0", first.text
    [second] = run([command(out, data, "")], ranks=2)
    [third] = run([command(out, data, "--batch.steps 12")])
    assert second.code == third.code == "0", second.text + third.text
    assert "step 4: resumes" in second.text
    assert "step 8: resumes" in third.text
    assert [line["step"] for line in read_metrics(out)] == list(range(1, 13))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_those_of_the_closed_form(data, tmp_path, name):
    """Their number and bytes, of the plan. Whole gradients are added up in more pieces, of at most 2**24 elements."""
    model = "--model.layers 5 --model.hidden 1024 --model.ffn 4096 --model.heads 8 --model.kv-heads 8"
    options = f"{model} --model.head-dim 128 --model.vocab 512 --validation.every 0 --checkpoint.every 0"
    given = command(tmp_path / "run", data, f"{options} {COLLECTIVES[name]}")
    run = [sys.executable, "-m", "bench.nullgpu", "--ranks", "2", "--json", str(tmp_path / "counts.json"), "-m"]
    done = subprocess.run([*run, "fasttrain", *given], capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    counts = json.loads((tmp_path / "counts.json").read_text())["counts"][-2]  # the last one validates and saves
    expected = traffic(work_of(load(given[1:], RECIPES), vocab=512, dp_size=2))
    for kind in ("all_gather", "reduce_scatter"):
        assert (counts.get(f"nccl:{kind}", 0), counts.get(f"nccl bytes:{kind}", 0)) == expected.get(kind, (0, 0)), kind
    small = counts["nccl bytes:all_reduce"] - expected.get("all_reduce", (0, 0))[1]
    assert 0 < small < 200  # losses, tokens and norms
    if "all_reduce" in expected:
        units, size = expected["all_reduce"]
        assert units <= counts["nccl:all_reduce"] - 2 <= units + size / 2**24
