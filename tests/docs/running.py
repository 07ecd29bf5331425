"""A command of the documentation, run for real: in this process, since a new one would wait seconds for torch.

Trainings are shortened, unless all of them are asked for: small settings are added in place of those that the command
does not name itself. Nothing else is changed but what IN_A_TEST says.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from fasttrain.cli import COMMANDS
from fasttrain.cli.parse import load
from fasttrain.recipes import RECIPES
from fasttrain.train import main as train
from tests.runs import SMALL

# Placeholders, and figures of runs that are longer than those of a test
IN_A_TEST = {
    "RUN": "runs/tiny",
    "NAME": "tiny",
    "OTHER": "runs/b",
    "N": "3",
    "DIR": "data/mine",
    "/data/tokens": "data/mine",
    "/mnt/big/runs": "runs",
    "4711": "47",
    "2000000000": "1000",
    "runs/base@400": "runs/base@15",
    "runs/a@300": "runs/a@15",
}
SHORT = [*SMALL, "--parallel.dp_replicate", "1"]
STEPS = 6  # of a shortened training
ALWAYS = ("--checkpoint.every", "--validation.every")  # also where the command names them
WHOLE = "tiny"  # the recipe that can be trained as it is, in minutes


class Outcome(NamedTuple):
    code: int
    output: str


def is_training(words: Sequence[str]) -> bool:
    return words[:2] == ["fasttrain", "train"] or words[:3] == ["python", "-m", "fasttrain.train"]


def training_options(words: Sequence[str]) -> list[str]:
    return list(words[words.index("train") + 1 :] if words[0] == "fasttrain" else words[3:])


def run(words: Sequence[str], *, everything: bool, fails: bool = False) -> Outcome:
    """In the current directory. fails: a mistake is shown, which ends a training before it has begun."""
    words = [IN_A_TEST.get(word, word) for word in words]
    target = None
    if ">" in words:
        target, words = words[words.index(">") + 1], words[: words.index(">")]
    whole = fails or (everything and is_training(words) and _can_be_whole(training_options(words)))
    outcome = call(_program(words, whole=whole))
    if target:
        Path(target).write_text(outcome.output)
    return outcome


def _program(words: Sequence[str], *, whole: bool) -> Callable[[], int]:
    if is_training(words):
        options = training_options(words)
        return lambda: train(options if whole or "--help" in options else shortened(options))
    if words[0] == "fasttrain":
        name, arguments = _command(words[1:])
        if "--out" in arguments and name in ("data prepare", "export"):  # they do not write over what is there
            remove(arguments[arguments.index("--out") + 1])
        if name == "verify-resume":
            arguments = shortened(arguments)
        return lambda: getattr(importlib.import_module(COMMANDS[name].module), COMMANDS[name].function)(arguments)
    assert words[:2] == ["python", "-m"], words
    return lambda: _module(words[2], words[3:])


def _can_be_whole(options: Sequence[str]) -> bool:
    """In a test of minutes; the runs to resume are short ones."""
    return _recipe(options) == WHOLE and "--resume" not in options


def shortened(options: Sequence[str]) -> list[str]:
    """A training of a few steps of a small model, with everything else as it is named."""
    pairs = [SHORT[at : at + 2] for at in range(0, len(SHORT), 2)]
    if (recipe := _recipe(options)) != WHOLE:
        pairs.append(["--out", f"runs/short-{list(RECIPES).index(recipe)}"])  # the recipe's name states another size
    added = [pair for pair in pairs if pair[0] in ALWAYS or pair[0] not in options]
    if "--from-hf" in options:
        added = [pair for pair in added if not pair[0].startswith("--model.")]
    return [*options, *(word for pair in added for word in pair), "--batch.steps", str(_few_steps(options))]


def _few_steps(options: Sequence[str]) -> int:
    """A fiftieth of what a command names, if that is more than a few; and some to profile."""
    if "--batch.steps" in options:
        return max(STEPS, int(options[options.index("--batch.steps") + 1]) // 50)
    return 2 * STEPS if {"--profile", "--log.profile"} & set(options) else STEPS


def directories(options: Sequence[str]) -> set[str]:
    """That a training may write to: as it is, and shortened."""
    return {
        given[given.index("--out") + 1] if "--out" in given else f"runs/{_recipe(options)}"
        for given in (list(options), shortened(options))
    }


def remove(directory: str) -> None:
    """Of the copy that a test has; a page may name any other."""
    assert Path(directory).resolve().is_relative_to(Path.cwd()), f"{directory} is not the test's own: see IN_A_TEST"
    shutil.rmtree(directory, ignore_errors=True)


def parse(words: Sequence[str]) -> None:
    """The parser of the command takes these words; a mistake fails the test."""
    words = [IN_A_TEST.get(word, word) for word in words]
    words = words[: words.index(">")] if ">" in words else words

    def parsed() -> int:
        if is_training(words):
            load(training_options(words), RECIPES)
            return 0
        if words[0] != "fasttrain":
            return 0 if importlib.util.find_spec(words[2]) else 2
        name, arguments = _command(words[1:])
        getattr(importlib.import_module(COMMANDS[name].module), COMMANDS[name].function).parse(arguments)
        return 0

    outcome = call(parsed)
    assert outcome.code == 0, outcome.output


def call(program: Callable[[], int]) -> Outcome:
    """Its exit code, and what it printed on both streams."""
    output = io.StringIO()
    typed = io.StringIO("the model\n")  # for commands that ask
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), patch.object(sys, "stdin", typed):
        try:
            code = program()
        except SystemExit as exit:
            code = 0 if exit.code is None else exit.code if isinstance(exit.code, int) else 1
            if isinstance(exit.code, str):
                print(exit.code)
    return Outcome(code, output.getvalue())


def missing(shown: str, output: str, *, numbers: bool) -> str:
    """The first line of a page that is not in the output, after the lines before it; `...` is anything.

    numbers: they are to be the same too.
    """
    rest = output.splitlines()
    for line in filter(None, map(str.strip, shown.splitlines())):
        if line == "...":
            continue
        pattern = re.compile(".*".join(_pattern(piece, numbers=numbers) for piece in line.split("...")))
        places = [number for number, printed in enumerate(rest) if pattern.search(printed)]
        if not places:
            return line
        rest = rest[places[0] + 1 :]
    return ""


def _pattern(text: str, *, numbers: bool) -> str:
    pattern = r"\s+".join(map(re.escape, re.split(r"\s+", text)))
    return pattern if numbers else re.sub(r"\d(?:\d|\\\.|,|e\\?[-+])*[kMGB]?", lambda _: r"[-+\d.,e]+[kMGB]?", pattern)


def _recipe(options: Sequence[str]) -> str:
    return options[options.index("--recipe") + 1] if "--recipe" in options else next(iter(RECIPES))


def _command(words: Sequence[str]) -> tuple[str, list[str]]:
    for length in (2, 1):
        if (name := " ".join(words[:length])) in COMMANDS:
            return name, list(words[length:])
    raise AssertionError(f"there is no command fasttrain {' '.join(words)}")


def _module(name: str, arguments: Sequence[str]) -> int:
    with patch.object(sys, "argv", [name, *arguments]):
        runpy.run_module(name, run_name="__main__", alter_sys=False)
    return 0
