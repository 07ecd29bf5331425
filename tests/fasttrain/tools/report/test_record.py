"""What is read from a run's directory: events of both forms, states, the clock, checkpoints, mistakes."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fasttrain.events import Event, Severity
from fasttrain.fs import exclusive_lock
from fasttrain.rundir import RunDir
from fasttrain.tools.report.record import Clock, read_records, state_of
from tests.fasttrain.tools.report.made import BEGAN, event_line, make_checkpoint, make_run, steps, write_lines

LATER = BEGAN + 1e6  # when a run that says nothing is no longer running


def record_of(run):
    (record,) = read_records([run])
    return record


def test_events_of_the_former_form():
    found = Event.of(dict(step=3, time=1.0, kind="rollback", text="back", skipped=[1, 2], documents=["a", "b"]))
    assert found.evidence == dict(skipped=[1, 2])
    assert (found.tokens, found.action, found.documents) == (None, "", ["a", "b"])
    assert found.severity == Severity.ACTION


def test_events_of_the_present_form():
    line = dict(step=3, time=1.0, tokens=12, kind="spike", text="up", action="roll back", evidence=dict(z=9.5))
    found = Event.of(line | dict(documents=None))
    assert (found.tokens, found.action, found.evidence, found.documents) == (12, "roll back", dict(z=9.5), [])
    assert Event.of(dict(evidence="odd")).evidence == dict(evidence="odd")
    assert Event.of(dict(kind="never heard of")).severity == Severity.WARNING


def test_finished(tmp_path):
    assert state_of(record_of(make_run(tmp_path / "run")), now=LATER).name == "finished"


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("signal", "stopped"),
        ("stop", "stopped"),
        ("early stop", "stopped"),
        ("not saved", "failed"),
        ("rank failure", "failed"),
        ("finish", "finished"),
        ("failed save", "failed"),
    ],
)
def test_how_a_run_ended(tmp_path, kind, state):
    run = make_run(tmp_path / "run", 50, planned=100, events=[event_line(50, kind, "the end")])
    assert state_of(record_of(run), now=LATER) == (state, "the end")


def test_a_run_without_last_words_has_failed(tmp_path):
    found = state_of(record_of(make_run(tmp_path / "run", 50, planned=100)), now=LATER)
    assert found.name == "failed"
    assert "killed, or crashed" in found.reason


def test_a_run_that_was_resumed_after_a_signal_is_not_stopped(tmp_path):
    ends = [event_line(20, "signal", "as asked"), event_line(20, "resume", "resumes")]
    run = make_run(tmp_path / "run", 50, planned=100, events=ends)
    assert state_of(record_of(run), now=BEGAN + 20).name == "running"  # its last line is fresh
    assert state_of(record_of(run), now=LATER).name == "failed"


def test_a_run_that_holds_its_directory_is_running(tmp_path):
    run = make_run(tmp_path / "run", 50, planned=100)
    with exclusive_lock(RunDir(run).lock, "taken"):
        assert state_of(record_of(run), now=LATER).name == "running"
    assert state_of(record_of(run), now=LATER).name == "failed"
    assert state_of(record_of(run), running=True, now=LATER).name == "running"


def test_hours_leave_out_the_time_between_processes():
    clock = Clock(np.array([0.0, 100_000.0]), np.array([0.0, 3600.0, 100_000.0, 103_600.0]))
    assert clock.hours(np.array([0.0, 3600.0, 100_000.0, 103_600.0])).tolist() == [0, 1, 1, 2]


def test_hours_of_a_run_that_does_not_say_when_it_began():
    assert Clock(np.array([]), np.array([50.0, 3650.0])).hours(np.array([50.0, 3650.0])).tolist() == [0, 1]


def test_checkpoints_and_their_state(tmp_path):
    run = make_run(tmp_path / "run")
    other = make_checkpoint(run, 250)
    os.rename(other, other.with_name("quarantined-step-00000250-0123abcd"))
    (run / "checkpoints/step-00000200/checkpoint.json").write_text("{}")
    checkpoints = record_of(run).checkpoints
    states = {saved.step: saved.state for saved in checkpoints}
    assert states == {100: "committed", 200: "corrupt", 250: "quarantined", 300: "committed"}
    assert "checkpoint.json does not say" in checkpoints[1].trouble


def test_names_tell_runs_apart(tmp_path):
    runs = [make_run(tmp_path / name / "run", 5) for name in ("a", "b")]
    assert [record.name for record in read_records(runs)] == ["a/run", "b/run"]
    assert [record.name for record in read_records([runs[0], runs[0]])] == ["run"]


def test_without_anything_but_metrics(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", steps(1, 3))
    record = record_of(tmp_path)
    assert (record.settings, record.events, record.checkpoints) == ({}, [], [])
    assert state_of(record, now=LATER).name == "failed"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda run: None, "does not exist; name a run"),
        (lambda run: run.write_text(""), "is not a directory; name a run"),
        (lambda run: run.mkdir(), "is not the directory of a run"),
        (lambda run: [run.mkdir(), (run / "config.toml").write_text("")], "has no metrics.jsonl yet"),
        (lambda run: [run.mkdir(), (run / "metrics.jsonl").write_text('{"step"')], "has no step yet"),
    ],
)
def test_mistakes(tmp_path, prepare, message):
    prepare(tmp_path / "run")
    with pytest.raises((ValueError, OSError), match=message):
        read_records([tmp_path / "run"])
