"""Help, mistakes, and commands that need no tensor: in under a second of CPU time, and without torch."""

import resource
import subprocess
import sys

import pytest

from fasttrain.cli import COMMANDS

LIMIT = 1.0  # seconds of CPU time, that of the interpreter included
MISTAKES = {  # beside an option that no command has: what is wrong with the values of some
    "train": ["--optim.lr", "fast"],
    "plan": ["--recipe", "124m", "--gpu", "h1000"],
    "doctor": ["--optim.lr", "fast"],
    "verify-resume": ["--steps", "4", "--kill-at", "4"],
    "data prepare": ["--out"],
    "data lint": ["--split"],
    "data locate": ["runs/x", "--step", "0"],
    "export": ["runs/x", "--out", "y", "--dtype", "int4"],
    "generate": ["runs/x", "--prompt", "a", "--temperature", "-1"],
    "eval": ["runs/x", "--limit", "3"],
    "report": ["--out", "x.html"],
    "checkpoint list": [],
    "checkpoint verify": [],
    "checkpoint prune": ["runs/x", "--keep", "0"],
}
CODE = (
    "import sys; from fasttrain.cli import main\n"
    "try: code = main({words!r})\n"
    "except SystemExit as end: code = end.code\n"
    "sys.exit(77 if {heavy!r} & sys.modules.keys() else code)"
)


def call(words: list[str], *heavy: str) -> tuple[int, float, str]:
    """Exit code, seconds of CPU time, what it says; code 77: it has imported torch, or what else is heavy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = CODE.format(words=words, heavy={"torch", *heavy})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, seconds, done.stdout + done.stderr


def test_every_command_has_a_mistake_here():
    assert list(MISTAKES) == list(COMMANDS)


@pytest.mark.parametrize("words", [["--help"], *([*name.split(), "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_answers_at_once(words):
    code, seconds, said = call(words)
    assert code == 0, said
    assert "fasttrain" in said
    assert seconds < LIMIT


@pytest.mark.parametrize(
    "words",
    [[*name.split(), *wrong] for name in COMMANDS for wrong in (["--no-such-option", "1"], MISTAKES[name])],
    ids=" ".join,
)
def test_a_mistake_in_an_argument_answers_at_once(words):
    code, seconds, said = call(words)
    assert code == 2, said
    assert said
    assert seconds < LIMIT


def test_checkpoints_are_listed_at_once(small_run):
    code, seconds, said = call(["checkpoint", "list", str(small_run)], "numpy")
    assert code == 0, said
    assert "2 in" in said
    assert seconds < LIMIT


def test_a_report_is_written_at_once(small_run, tmp_path):
    code, seconds, said = call(["report", str(small_run), "--out", str(tmp_path / "x.html")])
    assert code == 0, said
    assert (tmp_path / "x.html").stat().st_size > 10_000
    assert seconds < LIMIT


def test_defaults_that_stand_here_too_are_those_of_what_they_are_for():
    """A parser that imported them would import torch."""
    from fasttrain.cli import export, generate
    from fasttrain.distributed.runtime import DTYPES
    from fasttrain.hf.export import SHARD

    assert export.main.parse(["run", "--out", "x"]).shard_size == SHARD
    assert all(generate.main.parse(["run", "--dtype", name]).dtype == name for name in DTYPES)


def test_an_unknown_option_is_answered_with_the_nearest():
    code, _, said = call(["data", "prepare", "input", "--out", "x", "--tokeniser", "bytes"])
    assert code == 2
    assert "unrecognized arguments: --tokeniser bytes; did you mean --tokenizer?" in said
