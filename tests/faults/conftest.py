"""The slow faults run only where they are asked for, and all of them leave a row in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

COLUMNS = ("fault", "what happened", "lost", "reported")
Row = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", action="store_true", help="the slow faults too")
    parser.addoption("--fault-table", type=Path, help="write the table to this file, as Markdown")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("faults", False) or "faults" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("faults")]  # keywords have the name of this directory too
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


@pytest.fixture
def row(record_property: Callable[[str, object], None]) -> Row:
    """row(fault, happened=..., lost=..., reported=...): what a test has measured, in the table."""

    def add(fault: str, *, happened: str, lost: str, reported: str) -> None:
        record_property("fault", (fault, happened, lost, reported))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("faults", False):
        return
    rows = [*_rows(terminalreporter), *_skipped(terminalreporter)]
    terminalreporter.section("faults")
    for row in rows:
        terminalreporter.write_line(" | ".join(row))
    if path := config.getoption("--fault-table"):
        lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
        path.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
        terminalreporter.write_line(f"written to {path}")


def _rows(terminalreporter: pytest.TerminalReporter) -> Iterator[tuple[str, ...]]:
    """Of tests that passed: a row of another says nothing."""
    for report in terminalreporter.stats.get("passed", []):
        yield from (tuple(value) for name, value in report.user_properties if name == "fault")


def _skipped(terminalreporter: pytest.TerminalReporter) -> Iterator[tuple[str, ...]]:
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        yield report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " "), f"skipped: {reason}", "", ""
