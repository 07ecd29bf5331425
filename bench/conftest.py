"""Benchmarks print their figures at the end of the run, with the change since the last one; --save keeps them.

A test reports its figures through `report`; bench/figures.py says which of them gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import machine, tracking
from bench.figures import Figure, figure
from fasttrain.metrics.hardware import GpuSensors

Table = dict[str, dict[str, float | Figure]]  # figures by implementation and name


class Results:
    """The figures that the tests of this run have reported."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, dict[str, Figure]]] = {}  # by title
        self.figures: dict[str, Figure] = {}  # by the name of their row
        self.rows: tracking.Rows = {}
        self.past: list[tracking.Run] = []
        self.changes: list[tracking.Change] = []

    def add(self, title: str, table: Table, about: dict[str, Any]) -> list[str]:
        """Add a table; return the figures that exceed their limits."""
        broken = []
        for implementation, reported in table.items():
            for key, value in reported.items():
                name, one = f"{title.split(':')[0]}/{implementation}/{key}", figure(value)
                self.tables.setdefault(title, {}).setdefault(implementation, {})[key] = one
                self.figures[name] = one
                self.rows[name] = one.row() | ({"about": about | {"implementation": implementation}} if about else {})
                if one.broken:
                    broken.append(f"{name}: {one.broken}")
        return broken

    def lines(self) -> list[str]:
        lines = []
        for title, table in self.tables.items():
            lines.append(f"\n{title}")
            width = 2 + max(map(len, table))
            for implementation, row in table.items():
                lines.append(
                    f"  {implementation:<{width}}" + "   ".join(f"{key} {_short(f)}" for key, f in row.items())
                )
        return lines


_results = pytest.StashKey[Results]()
_broken = pytest.StashKey[list[str]]()  # of a test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--save", action="store_true", help="keep the figures in bench/results/history/")
    parser.addoption("--long", action="store_true", help="also benchmarks of many minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_results] = Results()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes many minutes (make bench-long, or --long)"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Read the saved runs before the first benchmark, so that a corrupt file costs nothing."""
    try:
        session.config.stash[_results].past = tracking.history(tracking.HISTORY)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    results = session.config.stash[_results]
    results.changes = tracking.changes(results.figures, results.past, machine.hardware())
    if any(change.worse for change in results.changes) and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results = config.stash[_results]
    for line in results.lines():
        terminalreporter.write_line(line)
    if not results.figures:
        return
    run = tracking.this_run(results.rows, GpuSensors(torch.device("cuda")).read() if torch.cuda.is_available() else {})
    if results.changes:
        _print_changes(terminalreporter.write_line, results, run)
    if config.getoption("--save"):
        terminalreporter.write_line(f"\nsaved in {tracking.save(run, tracking.HISTORY)}")


def _print_changes(write: Callable[[str], None], results: Results, run: tracking.Run) -> None:
    saved = tracking.saved_values(results.past, run.hardware)
    before_now = [saved[change.name][-1][1] for change in results.changes if change.name in saved]
    since = max(before_now, key=lambda past: past.date, default=None)
    before = f"last of them: {since.label}" if since else "none was saved before"
    where = run.hardware["gpu"] or run.hardware["cpu"]
    width = 2 + max(len(change.name) for change in results.changes)
    write(f"\nchange on {where}, {run.commit}{' with changes' if run.changes else ''} ({before})")
    write(f"  {'figure':<{width}}{'now':>12}{'last':>12}{'usual':>12}    change")
    for change in results.changes:
        write(change.line(width))
    if worse := sum(change.worse for change in results.changes):
        write(
            f"\n{worse} of {len(results.changes)} figures are worse than last and than usual by more than their margin"
        )


def _short(figure: Figure) -> str:
    if figure.kind in ("memory", "exact") and figure.unit == "B":
        return f"{figure.value / 1e6:10.3f} MB"
    if figure.unit == "s" and figure.value < 0.1:
        return f"{figure.value * 1e3:8.3f} ms"
    unit = f" {figure.unit}" if figure.unit else ""
    return f"{figure.value:8.3f}{unit}"


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[..., None]:
    """report("slug: what it is", table): figures by implementation, printed and tracked; fails beyond their limits.

    `about` is stored with every row, for the page of bench.report.
    """

    def publish(title: str, table: Table, *, about: dict[str, Any] | None = None) -> None:
        broken = request.config.stash[_results].add(title, table, about or {})
        request.node.stash.setdefault(_broken, []).extend(broken)

    return publish


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """A test whose figures are beyond their limits fails, once it has reported all of them."""
    result = yield
    broken = pyfuncitem.stash.get(_broken, [])
    assert not broken, "; ".join(broken)
    return result


@pytest.fixture
def one_thread() -> Any:
    """CPU time of several threads counts how they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
