"""Benchmarks print their ratios at the end of the run; --store also writes them to bench/results/."""

import json
import platform
from pathlib import Path

import pytest
import torch

RESULTS = Path(__file__).parent / "results"
_lines = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    parser.addoption("--store", action="store_true", help="write the measurements to bench/results/")


def pytest_configure(config):
    config.stash[_lines] = []


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash[_lines]:
        terminalreporter.write_line(line)


@pytest.fixture
def report(request):
    """report(name, table): rows of figures by contender, printed, and stored where --store asks for it."""

    def publish(name: str, table: dict[str, dict[str, float]]) -> None:
        lines = request.config.stash[_lines]
        lines.append(f"\n{name}")
        for contender, row in table.items():
            lines.append(f"  {contender:<42}" + "".join(f"{key} {value:8.3f}   " for key, value in row.items()))
        if request.config.getoption("--store"):
            machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
            text = json.dumps(dict(machine=machine, table=table), indent=1)
            (RESULTS / f"{name.split(':')[0]}.json").write_text(text + "\n")

    return publish
