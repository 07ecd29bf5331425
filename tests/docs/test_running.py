"""The checks of this directory can fail: what runs a command, compares its output, and reads a page."""

from __future__ import annotations

import pytest

from tests.docs.elsewhere import elsewhere
from tests.docs.pages import Block, commands_of
from tests.docs.running import missing, parse, remove, run, shortened


@pytest.mark.parametrize(
    ("shown", "numbers", "absent"),
    [
        ("loss 3.5 at step 7", True, ""),
        ("loss 3.6 at step 7", True, "loss 3.6 at step 7"),
        ("loss 3.6 at step 1,200", False, ""),
        ("loss 3.6 in step 1,200", False, "loss 3.6 in step 1,200"),
        ("loss ... step 7\n...\ndone", True, ""),
        ("done\nloss 3.5 at step 7", True, "loss 3.5 at step 7"),  # the order counts
        ("lr 1e-05", False, ""),
        ("lr  0.003", True, "lr  0.003"),
    ],
)
def test_shown_output_is_compared_line_by_line(shown: str, numbers: bool, absent: str) -> None:
    assert missing(shown, "begin\nloss  3.5 at step 7\nlr 3e-04\ndone\n", numbers=numbers) == absent


@pytest.mark.parametrize(
    "words",
    ["fasttrain train --optim.rate 1", "fasttrain verify-resume --stops 3", "fasttrain report runs/a --nonsense"],
)
def test_a_mistake_in_a_command_is_found(words: str) -> None:
    with pytest.raises(AssertionError):
        parse(words.split())


def test_a_command_that_fails_says_so(home) -> None:
    assert run(["fasttrain", "data", "lint", "data/nothing"], everything=False).code == 2
    with pytest.raises(AssertionError, match="there is no command"):
        run(["fasttrain", "trian"], everything=False)


def test_a_test_removes_only_what_is_its_own(home) -> None:
    with pytest.raises(AssertionError, match="not the test's own"):
        remove(str(home.parent / "else"))


@pytest.mark.parametrize(
    "command",
    ["make tset", "pip install 'fasttrain[nothing]'", "torchrun --nprocs=8 -m fasttrain.train",
     "torchrun --nproc_per_node=8 -m fasttrain.train --optim.rate 1", "sbatch examples/none.sh",
     "python -m pytest bench/test_none.py"],
)  # fmt: skip
def test_a_mistake_in_a_command_for_elsewhere_is_found(command: str) -> None:
    row = elsewhere(command)
    assert row
    with pytest.raises((AssertionError, SystemExit)):
        row.check(command.replace("'", "").split())


def test_what_a_training_names_stays_as_it_is() -> None:
    options = shortened(["--model.layers", "5", "--batch.steps", "500"])
    assert options.count("--model.layers") == 1
    assert options[-2:] == ["--batch.steps", "10"]


def test_commands_are_told_from_output_comments_and_lines_that_go_on() -> None:
    text = "$ one 'a # b' \\\n  two  # why\nprinted\n$ three\n"
    found = list(commands_of(Block("page", 1, "console", text)))
    assert [(command.words, command.shown) for command in found] == [
        (["one", "a # b", "two"], "printed"),
        (["three"], ""),
    ]
    plain = list(commands_of(Block("page", 1, "", 'one  # why\n# only a comment\npython3 -c "\nprint()\n"\n')))
    assert [command.text for command in plain] == ["one", 'python3 -c "\nprint()\n"']
