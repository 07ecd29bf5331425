"""Commands that a test cannot run: the one table of them, each with its reason and what is checked instead."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch.distributed.run import get_args_parser

from fasttrain.cli.parse import load
from fasttrain.recipes import RECIPES
from tests.docs.pages import ROOT
from tests.docs.running import IN_A_TEST, call, parse

EXTRAS = {
    name: tomllib.loads((ROOT / directory / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for directory, names in ((".", ("fasttrain", ".")), ("kernels", ("fasttrain-kernels", "./kernels")))
    for name in names
}


def is_target_of_make(words: Sequence[str]) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):.*##", (ROOT / "Makefile").read_text(), re.M))
    assert set(words[1:]) <= targets, f"make has {', '.join(sorted(targets))}"


def is_declared(words: Sequence[str]) -> None:
    """Extras exist, files exist, and other packages are those that an extra brings."""
    arguments = [word for word in words[2:] if not word.startswith("-") and word != "constraints.txt"]
    assert arguments
    for argument in arguments:
        if named := re.fullmatch(r"([\w./-]+)\[([\w,-]+)\]", argument):
            assert set(named[2].split(",")) <= set(EXTRAS[named[1]]), f"there is no extra {named[2]}"
        else:
            assert argument in EXTRAS or argument.endswith(".whl"), argument
    assert "-c" not in words or (ROOT / words[words.index("-c") + 1]).exists()


def is_launch(words: Sequence[str]) -> None:
    """torchrun's own parser, and then ours, take the words."""
    options = get_args_parser().parse_args([re.sub(r"^\$\w+$", "0", word) for word in words[1:]])
    assert options.module, "torchrun -m fasttrain.train"
    assert options.training_script == "fasttrain.train"
    _are_settings(options.training_script_args)


def is_job(words: Sequence[str]) -> None:
    """The script is there and is bash; test_slurm.py runs it."""
    script, *arguments = [word for word in words[1:] if not word.startswith("--nodes")]
    assert (ROOT / script).exists()
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    _are_settings(arguments)


def has_curves(words: Sequence[str]) -> None:
    assert words[1] == "--logdir"
    assert list(Path(words[2]).rglob("events.out.tfevents.*"))


def is_module(words: Sequence[str]) -> None:
    """python -m MODULE: it can be found, and so can the files that it is given."""
    assert words[1] == "-m"
    assert importlib.util.find_spec(words[2]), f"there is no module {words[2]}"
    has_files(words[3:])


def has_files(words: Sequence[str]) -> None:
    for word in words:
        assert not word.startswith(("tests/", "bench/")) or (ROOT / word).exists(), f"there is no {word}"


def nothing(words: Sequence[str]) -> None:
    """It is not ours."""


def _are_settings(arguments: Sequence[str]) -> None:
    arguments = [IN_A_TEST.get(argument, argument) for argument in arguments]
    outcome = call(lambda: 0 if load(arguments, RECIPES) else 1)
    assert outcome.code == 0, outcome.output


class Elsewhere(NamedTuple):
    begins: str  # the command
    reason: str
    check: Callable[[Sequence[str]], None]


ELSEWHERE = [
    Elsewhere("make ", "installs, and runs for minutes; CI does", is_target_of_make),
    Elsewhere("pip install ", "changes the environment", is_declared),
    Elsewhere("torchrun ", "needs several GPUs; test_launch.py trains on CPU ranks", is_launch),
    Elsewhere("sbatch ", "needs Slurm; test_slurm.py runs the script", is_job),
    Elsewhere("tensorboard ", "serves until it is killed", has_curves),
    Elsewhere("wandb login", "needs an account", nothing),
    Elsewhere("python -m fasttrain.train --log.wandb", "needs an account", parse),
    Elsewhere("fasttrain eval runs/a --tasks", "downloads its questions; make test-eval has its own", parse),
    Elsewhere("vllm ", "needs a GPU, and is no dependency", nothing),
    Elsewhere(". .venv/bin/activate", "changes the shell", nothing),
    Elsewhere("python -m fasttrain_kernels.testing.compiled", "takes minutes: make compiled", is_module),
    Elsewhere("pytest ", "takes minutes: make test-faults", has_files),
    Elsewhere("python -m pytest bench/", "takes minutes: make bench", is_module),
    Elsewhere("python -m bench.fit_plan", "takes minutes, and may overwrite stored figures", is_module),
    Elsewhere("python -m tests.kernels.numbers.table", "takes minutes", is_module),
    Elsewhere("python -m tests.docs.", "writes a page, which its test compares", is_module),
]


def elsewhere(command: str) -> Elsewhere | None:
    return next((row for row in ELSEWHERE if command.startswith(row.begins)), None)
