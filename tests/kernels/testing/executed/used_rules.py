"""A plugin of pytest: at the end, print the rules that no test has used. Rows of the table have their own test."""

from __future__ import annotations

from typing import Any

import pytest

from fasttrain_kernels.testing.executed import program, translate

_unused: set[str] = set()


def pytest_configure() -> None:
    assert program.RULES  # imported: they are registered
    for rules in translate._RULES.values():
        for at, (spelling, function) in enumerate(rules):
            if not function.__qualname__.startswith("_row"):
                _unused.add(spelling.pattern)
                rules[at] = spelling, _noting(spelling.pattern, function)


def _noting(spelling: str, function: Any) -> Any:
    def note(*arguments: Any) -> Any:
        _unused.discard(spelling)
        return function(*arguments)

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for spelling in sorted(_unused):
        terminalreporter.write_line(f"unused rule: {spelling}")
