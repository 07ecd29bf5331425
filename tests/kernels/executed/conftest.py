"""What takes minutes is executed only where it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--executed", action="store_true", help="every case on every target, schedules and mutations")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("executed", False) or "executed" in config.option.markexpr:
        return
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    long = [item for item in ours if item.get_closest_marker("executed")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]
