"""One directory for all commands, and an option to run all of them as they stand."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.docs.home import copy_home, make_home


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--docs", action="store_true", help="every command of the documentation, also those of minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("docs", False):
        return
    slow = [item for item in items if item.get_closest_marker("docs")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def everything(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--docs", False)


@pytest.fixture(scope="session")
def whole_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, also where several processes run tests."""
    base = tmp_path_factory.getbasetemp()
    home, before = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "whole home", Path.cwd()
    with open(home.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.with_suffix(".made").exists():  # runs know where their data is: no other name for it later
            home.mkdir()
            os.chdir(home)
            try:
                make_home(home)
            finally:
                os.chdir(before)
            home.with_suffix(".made").touch()
    return home


@pytest.fixture
def home(whole_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current directory."""
    copy_home(whole_home, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path / "home"
