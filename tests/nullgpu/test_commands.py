"""The commands of the README beside `fasttrain train`, on "cuda"."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.nullgpu.test_training import SMALL

COMMANDS = {
    "generate": ["generate", "RUN", "--prompt", "w1 w2", "--device", "cuda", "--tokens", "8", "--ignore-end"],
    "eval": ["eval", "RUN", "--device", "cuda"],
    "export": ["export", "RUN", "--out", "EXPORT"],
    "train --from-hf": ["train", *SMALL, "--data.path", "DATA", "--from-hf", "EXPORT", "--out", "FROM"],
    "doctor": ["doctor"],
    "plan": ["plan", *SMALL, "--data.path", "DATA", "--gpu", "h100-sxm"],
    "data locate": ["data", "locate", "RUN", "--step", "2"],
    "report": ["report", "RUN", "FROM", "--out", "PAGE"],
    "checkpoint list": ["checkpoint", "list", "RUN"],
    "checkpoint verify": ["checkpoint", "verify", "RUN"],
    "checkpoint prune": ["checkpoint", "prune", "RUN", "--keep", "1"],
}
SAYS = {
    "generate": r"^w1 w2",
    "eval": r"held-out +nan",  # no token has a loss on a GPU that computes nothing, and eval says so by its code
    "export": r"Qwen3, [\d,]+ parameters",
    "train --from-hf": r"1 rank on cuda in bf16",
    "doctor": r"GPU 0 +NVIDIA H100[^\n]*\n(.*\n)*fine: nothing that a run needs is missing",
    "plan": r"",
    "data locate": r"",
    "report": r"",
    "checkpoint list": r"newest",
    "checkpoint verify": r"2 valid, 0 corrupt",
    "checkpoint prune": r"",
}


@pytest.fixture(scope="module")
def answers(run, data, tmp_path_factory):
    root = tmp_path_factory.mktemp("commands")
    places = {name: str(root / name.lower()) for name in ("RUN", "EXPORT", "FROM", "PAGE")}
    places["DATA"] = str(data)
    train = ["train", *SMALL, "--data.path", "DATA", "--out", "RUN", "--parallel.compile", "off"]
    commands = [[places.get(word, word) for word in command] for command in (train, *COMMANDS.values())]
    first, *others = run(commands)
    assert first.code == "0", first.text
    return dict(zip(COMMANDS, others, strict=True)), places


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_the_readme(answers, name):
    answer = answers[0][name]
    assert "Traceback" not in answer.text, answer.text
    assert answer.code == ("1" if name == "eval" else "0"), answer.text
    assert re.search(SAYS[name], answer.text, re.MULTILINE), answer.text


def test_an_export_has_the_weights_that_were_on_the_device(answers):
    """Zeros: the null GPU keeps nothing that is written."""
    weights = load_file(f"{answers[1]['EXPORT']}/model.safetensors")
    assert "model.embed_tokens.weight" in weights
    assert not any(torch.any(weight) for weight in weights.values())


@pytest.mark.parametrize(
    ("zero", "tests"),
    [
        (1, ["tests/fasttrain/cli/test_doctor.py", "tests/fasttrain/metrics/test_sensors.py"]),
        (0, ["tests/fasttrain/data/test_batches.py"]),  # copies are made
    ],
    ids=["sensors", "copies"],
)
def test_what_the_tests_for_gpus_assert_of_the_host(zero, tests, request):
    command = [f"NULLGPU_ZERO={zero}", sys.executable, "-m", "bench.nullgpu", "-m", "pytest", "-p", "no:xdist"]
    command += ["-p", "no:cacheprovider", "-m", "gpu", *tests]
    done = subprocess.run(["env", *command], capture_output=True, text=True, cwd=request.config.rootpath)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
