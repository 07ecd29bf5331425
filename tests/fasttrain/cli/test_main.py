"""`fasttrain COMMAND`: the right module gets the rest of the line; a wrong name gets a hint."""

import importlib
import subprocess
import sys
from typing import Any

import pytest

from fasttrain import cli


def test_command_gets_the_rest_of_the_line(monkeypatch):
    monkeypatch.setattr(
        cli, "COMMANDS", {"data show": cli.Command("shown", "shows", "show"), "data": cli.Command("no", "no")}
    )
    called = []
    module: Any = type(sys)("shown")
    module.show = lambda arguments: called.append(arguments) or 7
    monkeypatch.setitem(sys.modules, "shown", module)
    assert cli.main(["data", "show", "--x", "data"]) == 7
    assert called == [["--x", "data"]]


@pytest.mark.parametrize("words", [["--help"], ["-h"]])
def test_help_lists_all_commands(words, capsys):
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert all(f"fasttrain {name}" in printed for name in cli.COMMANDS)


def test_no_command_is_a_mistake(capsys):
    assert cli.main([]) == 2
    assert "fasttrain train" in capsys.readouterr().out


def test_unknown_command_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_every_command_has_its_function():
    for command in cli.COMMANDS.values():
        assert callable(getattr(importlib.import_module(command.module), command.function))


def test_help_imports_no_torch():
    code = "import sys; from fasttrain import cli; cli.main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
