"""Figures that gate, files of runs, and reported changes: in files, and in a real run of pytest."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

import bench.conftest  # noqa: F401  (so that runs in this process find it)
from bench import machine, tracking
from bench.figures import Figure, exact, figure, memory, rate, ratio, seconds

pytest_plugins = "pytester"
HERE = {"cpu": "A CPU (1, 2)", "cores": 2, "gpu": None, "gpus": 0}


def run(date: str, commit: str = "abc", rows: dict[str, float] | None = None, **changed) -> tracking.Run:
    stored = {name: ratio(value).row() for name, value in (rows or {}).items()}
    head = dict(changes="", hardware=HERE, versions={"torch": "2.13.0"}) | changed
    return tracking.Run(date=date, commit=commit, rows=stored, **head)


@pytest.mark.parametrize(
    ("one", "last", "worse"),
    [
        (ratio(1.14), 1.0, False),
        (ratio(1.16), 1.0, True),
        (ratio(1.16, margin=0.2), 1.0, False),
        (ratio(0.86, at_least=0.5), 1.0, False),  # more is better
        (ratio(0.84, at_least=0.5), 1.0, True),
        (ratio(2.0, at_least=0.5), 1.0, False),
        (ratio(9.0, margin=None), 1.0, False),
        (exact(100, "B"), 100, False),
        (exact(101, "B"), 100, True),
        (exact(99, "B"), 100, False),
        (seconds(9), 1, False),
        (memory(9), 1, False),
    ],
)
def test_worse_than_last_time(one: Figure, last: float, worse: bool):
    assert one.worse_than(last) is worse


def test_limits():
    assert not ratio(1.0, at_most=1.0).broken
    assert ratio(1.01, at_most=1.0).broken == "1.01 is more than 1"
    assert rate(4, "M/s", at_least=5).broken == "4 is less than 5"
    assert ratio(float("nan"), at_most=1.0).broken
    assert ratio(float("nan"), at_least=1.0).broken
    assert figure(3).kind == "note"


def test_a_file_holds_all_and_reads_back(tmp_path):
    one = run("2026-01-02T03:04:05+00:00", rows={"a/x": 0.5}, sensors={"sm_clock": 1980.0})
    path = tracking.save(one, tmp_path)
    assert path.name == "2026-01-02-a-cpu-1-2-2x-abc.json"
    assert tracking.load(path) == one
    stored = json.loads(path.read_text())
    assert stored["rows"] == [{"name": "a/x", "value": 0.5, "unit": "", "kind": "ratio", "margin": 0.15}]
    assert stored["dirty"] is False


def test_rows_of_one_source_are_merged_and_of_others_are_not(tmp_path):
    tracking.save(run("2026-01-02T01:00:00", rows={"a": 1, "b": 1}), tmp_path)
    tracking.save(run("2026-01-02T02:00:00", rows={"b": 2}), tmp_path)
    for other in (dict(commit="def"), dict(changes="1234"), dict(hardware=HERE | {"cores": 4})):
        tracking.save(run("2026-01-02T03:00:00", rows={"b": 3}, **other), tmp_path)
    runs = tracking.history(tmp_path)
    assert len(runs) == 4
    values = {name: row["value"] for name, row in runs[0].rows.items()}
    assert values == {"a": 1, "b": 2}


def test_last_is_the_newest_of_each_row_on_the_same_hardware():
    runs = [
        run("2026-01-01", rows={"a": 1, "b": 1}),
        run("2026-01-02", rows={"a": 2}),
        run("2026-01-03", rows={"a": 3}, hardware=HERE | {"cpu": "another"}),
    ]
    found = tracking.changes({"a": ratio(2.5), "b": ratio(1.05), "c": ratio(1), "d": seconds(1)}, runs, HERE)
    assert [(change.name, change.last, change.worse) for change in found] == [
        ("a", 2, True),
        ("b", 1, False),
        ("c", None, False),
    ]
    assert "+25.0%  WORSE, by more than 15%" in found[0].line(8)
    assert "new" in found[2].line(8)


def test_a_lucky_run_is_not_the_measure_of_those_after_it():
    def worse(now: Figure, *saved: float) -> bool:
        runs = [run(f"2026-01-{day:02}", rows={"a": value}) for day, value in enumerate(saved, 1)]
        (change,) = tracking.changes({"a": now}, runs, HERE)
        return change.worse

    assert not worse(ratio(0.95), 0.9, 0.94, 0.6)  # beside the median, 0.9
    assert worse(ratio(1.1), 0.9, 0.94, 0.6)
    assert not worse(ratio(1.1), 0.9, 0.9, 1.0)  # saved as the price of something
    assert worse(ratio(1.1), 2.0, 2.0, 2.0, 0.9, 0.9, 0.9)  # better for good: what is older than five runs is past
    assert worse(ratio(0.8, at_least=0.5), 1.0, 0.98, 1.5)  # more is better
    assert not worse(ratio(0.95, at_least=0.5), 1.0, 0.98, 1.5)
    assert worse(exact(101, "B"), 200, 200, 100)  # does not vary


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "x.json").write_text('{"rows": [}')
    with pytest.raises(ValueError, match="x.json is not a result of the benchmarks.*restore it"):
        tracking.history(tmp_path)


def test_all_stored_results_read():
    assert all(run.rows for run in tracking.history(tracking.HISTORY))


def test_source_knows_changes(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert machine.source(tmp_path / "nowhere") == ("unknown", "")
    git("init")
    (tmp_path / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "a")
    commit, changes = machine.source(tmp_path)
    assert re.fullmatch("[0-9a-f]{10}", commit)
    assert changes == ""
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "bench/results/x.json").write_text("{}")  # results and prose are not source
    (tmp_path / "README.md").write_text("x")
    assert machine.source(tmp_path) == (commit, "")
    (tmp_path / "b.py").write_text("1")
    new = machine.source(tmp_path)[1]
    (tmp_path / "b.py").write_text("2")
    newer = machine.source(tmp_path)[1]
    (tmp_path / "a.py").write_text("2")
    assert len({"", new, newer, machine.source(tmp_path)[1]}) == 4


TEST = """
import pytest
from bench.figures import exact, ratio, seconds

def test_one(report):
    numbers = {{"time": seconds({value}), "of theirs": ratio({value}), "bytes": exact(8, "B")}}
    report("step: a step", {{"ours": numbers}})

def test_limit(report):
    report("limited: with a limit", {{"ours": {{"x": ratio({value}, at_most=5, margin=None)}}}})
    report("after: reported all the same", {{"ours": {{"x": 1}}}})

@pytest.mark.long
def test_long(report):
    raise AssertionError("ran")
"""


@pytest.fixture
def run_bench(pytester, monkeypatch):
    """A run of pytest, in this process, with the benchmarks' conftest."""
    monkeypatch.setattr(tracking, "HISTORY", pytester.path / "history")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a second each time

    def run(value: float, *options: str) -> tuple[int, str]:
        pytester.makepyfile(TEST.format(value=value))
        done = pytester.runpytest_inprocess("-p", "bench.conftest", *options)
        return done.ret, done.stdout.str() + done.stderr.str()

    return run


def test_a_run_tells_its_change_and_fails_when_it_is_worse(run_bench):
    code, out = run_bench(1.0)
    assert code == 0, out
    assert "none was saved before" in out
    assert "1 skipped" in out  # the long one
    assert not tracking.HISTORY.exists()  # nothing is written unless it is asked for
    code, out = run_bench(1.0, "--save")
    assert code == 0, out
    (path,) = tracking.HISTORY.iterdir()
    assert "step/ours/of theirs" in path.read_text()
    code, out = run_bench(1.05)
    assert code == 0, out
    assert re.search(r"step/ours/of theirs +1\.050 +1\.000 +1\.000 +\+5\.0%\n", out)
    code, out = run_bench(6.0)
    assert code == 1
    assert re.search(r"step/ours/of theirs .*WORSE, by more than 15%", out)
    assert "limited/ours/x: 6 is more than 5" in out
    assert "after: reported all the same" in out
    code, out = run_bench(2.0)
    assert code == 1  # no test has failed, and the run has
    assert "2 passed" in out
    assert "1 of 2 figures are worse" in out
    path.write_text("{")
    code, out = run_bench(1.0)  # reported before anything is measured
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "is not a result of the benchmarks" in out
    assert "passed" not in out
