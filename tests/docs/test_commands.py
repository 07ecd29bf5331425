"""Every command in the README and the pages is run, or is in the table of those that cannot be, and is checked there.

`make test` shortens trainings, and parses what takes longer than that; `make test-docs` runs these too.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.docs.elsewhere import ELSEWHERE, elsewhere
from tests.docs.pages import SHELL, Block, Command, blocks, commands, commands_of, inline_commands
from tests.docs.running import directories, is_training, missing, parse, remove, run, training_options

SLOW = (  # 5 s of CPU time and more
    "fasttrain doctor",
    "fasttrain train --profile",
    "fasttrain train --recipe 124m --log.profile",
    "fasttrain verify-resume",
    "python -m bench.static --check",
    "python -m fasttrain_kernels.testing.self_check",
)
SHELLS = ("python3 -c", "grep ")
EXACT = ("fasttrain plan", "fasttrain data", "fasttrain checkpoint")  # numbers on the page are those of the test too
TYPED = [block for block in blocks() if block.language in SHELL]


@pytest.mark.parametrize("block", TYPED, ids=str)
def test_the_commands_of_a_block_run_one_after_another(block: Block, home: Path, everything: bool) -> None:
    typed = list(commands_of(block))
    assert typed, f"{block}: no command; output is ```text, and behind a $ in ```console"
    seen: set[str] = set()
    for command, after in zip(typed, [*typed[1:], None], strict=True):
        expected = int(after.shown) if after and after.text == "echo $?" else 0
        if command.text != "echo $?":
            _deal_with(command, block, expected, seen, everything=everything)


def _deal_with(command: Command, block: Block, expected: int, seen: set[str], *, everything: bool) -> None:
    if command.text.startswith(SHELLS):
        _in_a_shell(command)
    elif row := elsewhere(command.text):
        row.check(command.words)
    elif command.text.startswith(SLOW) and "--quick" not in command.words and not everything:
        parse(command.words)
    elif command.words[0] == "fasttrain" or command.words[:2] == ["python", "-m"]:
        if is_training(command.words) and "--help" not in command.words:
            _make_way(training_options(command.words), seen if block.language == "console" else set())
        outcome = run(command.words, everything=everything, fails=expected != 0)
        assert outcome.code == expected, f"{command} has exit code {outcome.code}:\n{outcome.output}"
        _compare(command, outcome.output)
    else:
        pytest.fail(f"{command}: no test runs it; give it a rule here, or a row in elsewhere.py")


def _compare(command: Command, output: str) -> None:
    line = missing(command.shown, output, numbers=command.text.startswith(EXACT))
    assert not line, f"{command} does not print\n{line}\nbut\n{output}"


def _make_way(options: Sequence[str], seen: set[str]) -> None:
    """A training does not find its directory, except that of an earlier one in a console, which it resumes."""
    for out in directories(options):
        if out not in seen:
            remove(out)
        seen.add(out)


def _in_a_shell(command: Command) -> None:
    """Here, or where the page says that it is to be typed."""
    place = Path.cwd()
    if command.page == "docs/checkpoints.md":
        place = sorted((place / "runs/tiny/checkpoints").glob("step-*"))[-1]
    done = subprocess.run(["bash", "-c", command.text], cwd=place, check=True, text=True, stdout=subprocess.PIPE)
    _compare(command, done.stdout)


def test_commands_between_backticks_exist(home: Path) -> None:
    """They are mentioned, not told to be typed: the parser knows them, or the table does."""
    for command in inline_commands():
        if command.words[0] == "torchrun" and "-m" not in command.words:
            assert set(command.words[1:]) <= set(get_args_parser()._option_string_actions), str(command)
        elif row := elsewhere(command.text):
            row.check(command.words)
        elif command.words[0] == "fasttrain" and "--" in command.text:
            parse([word for word in command.words if word not in ("--help", "...")])
        else:
            assert run([*command.words, "--help"], everything=False).code == 0, str(command)


def test_there_are_commands() -> None:
    found = [command.text for command in commands()]
    assert len(found) > 60
    assert any(is_training(text.split()) for text in found)


def test_no_row_of_the_table_is_left_over() -> None:
    found = [command.text for command in [*commands(), *inline_commands()]]
    assert [row.begins for row in ELSEWHERE if not any(text.startswith(row.begins) for text in found)] == []
