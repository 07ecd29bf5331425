"""The page as a file: self-contained, whole, safe whatever a run has written, and small whatever its length."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from fasttrain.cli import report
from fasttrain.tools.report.page import encoded, page, write_report
from fasttrain.tools.report.record import read_records
from tests.fasttrain.tools.report.made import event_line, make_run, steps, write_lines

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028&amp;@@style@@$style${style}"


def content(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


class Scripts(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.starts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.starts.append(tag)


def test_whatever_a_run_writes_stays_text(tmp_path):
    events = [event_line(5, NASTY, NASTY, action=NASTY, evidence={NASTY: NASTY}, documents=[NASTY])]
    events.append(event_line(9, "sample", NASTY))
    run = make_run(tmp_path / "<b>&run", 10, events=events)
    write_lines(run / "validation.jsonl", [dict(step=9, time=1.0, set=NASTY, loss=1.0)])
    html = page(read_records([run]))
    plain = page(read_records([make_run(tmp_path / "plain", 10)]))
    assert Scripts(html).starts == Scripts(plain).starts
    assert "<title>&lt;b&gt;&amp;run · fasttrain</title>" in html
    (shown,) = content(html)["runs"]
    (event,) = [event for event in shown["events"] if event["step"] == 5]
    assert (event["kind"], event["text"], event["action"], event["documents"]) == (NASTY, NASTY, NASTY, [NASTY])
    assert event["evidence"] == {NASTY: NASTY}
    assert shown["samples"][0]["text"] == NASTY
    assert NASTY in shown["validations"]


def test_the_page_needs_nothing_else(tmp_path):
    html = page(read_records([make_run(tmp_path / "run", 10)]))
    addresses = set(re.findall(r"https?://[^\"'\s)]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "default-src 'none'" in html
    assert "@import" not in html
    assert "url(" not in html


def test_values_that_are_not_finite_are_gaps(tmp_path):
    run = make_run(tmp_path / "run", 5)
    (run / "metrics.jsonl").unlink()
    lines = steps(1, 5)
    lines[2] |= dict(loss=None, nonfinite=["loss"])
    write_lines(run / "metrics.jsonl", lines)
    (shown,) = content(page(read_records([run])))["runs"]
    losses = shown["series"]["loss"]["mean"]
    assert [loss is None for loss in losses] == [False, False, True, False, False]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.array([math.nan])[0]])
def test_encoded_has_no_nan(value):
    assert json.loads(encoded(dict(a=value, b=[value], c=np.array([value, 1.5])))) == dict(
        a=None, b=[None], c=[None, 1.5]
    )


def test_marks_are_at_their_places(tmp_path):
    events = [event_line(7, "spike", "up", tokens=123_456), event_line(8, "odd", "no tokens")]
    (shown,) = content(page(read_records([make_run(tmp_path / "run", 10, events=events)])))["runs"]
    spike, odd = shown["events"][1:]
    assert spike["x"] == dict(step=7, tokens=123_456, hours=pytest.approx(7 * 0.35 / 3600, abs=1e-6))
    assert odd["x"]["tokens"] == 8 * 4096
    assert (spike["severity"], odd["severity"]) == ("error", "warning")


def test_a_long_run_keeps_its_extremes_and_stays_small(tmp_path):
    events = [event_line(15_000, "spike", "up")]
    run = make_run(tmp_path / "run", 20_000, blocks=24, events=events)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[4_321]["loss"] = 99.0
    (run / "metrics.jsonl").unlink()
    write_lines(run / "metrics.jsonl", lines)
    html = page(read_records([run]))
    (shown,) = content(html)["runs"]
    assert len(html) < 2.5e6
    assert max(shown["series"]["loss"]["high"]) == 99.0
    assert len(shown["x"]["step"]) < 2000
    assert set(range(14_970, 15_030)) <= set(shown["x"]["step"])
    assert shown["x"]["step"][-1] == 20_000
    assert all(len(curve["mean"]) == len(shown["x"]["step"]) for curve in shown["series"].values())


def test_comparison_has_differences_only(tmp_path):
    runs = [make_run(tmp_path / "a", 20, lr=1e-3), make_run(tmp_path / "b", 20, lr=3e-4, planned=40)]
    shown = content(page(read_records(runs)))
    rows = {row["key"]: row["values"] for row in shown["differences"]}
    assert rows == {"optim.lr": ["0.001", "0.0003"], "batch.steps": ["20", "40"]}
    figures = shown["runs"][0]["figures"]
    assert figures["tokens"] == 20 * 4096
    assert figures["validation_step"] == 20
    assert 0.3 < figures["mfu"] < 0.5
    assert not content(page(read_records(runs[:1])))["differences"]


def test_settings_that_are_not_the_defaults(tmp_path):
    (shown,) = content(page(read_records([make_run(tmp_path / "a", 20, lr=7e-4)])))["runs"]
    rows = {(part["name"], row["key"]): row["changed"] for part in shown["settings"] for row in part["settings"]}
    assert rows["optim", "lr"]
    assert rows["batch", "steps"]
    assert not rows["optim", "clip"]
    assert not rows["run", "out"]


def test_what_was_rolled_back_can_be_seen(tmp_path):
    run = make_run(tmp_path / "run", 40)
    write_lines(run / "metrics.jsonl", steps(31, 50))
    (shown,) = content(page(read_records([run])))["runs"]
    (ghost,) = shown["taken_back"]
    assert ghost["x"]["step"] == list(range(31, 41))
    assert len(ghost["loss"]) == 10


def test_a_report_replaces_the_former_one_whole(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", 10)
    write_report([run], run / "report.html", running=True)
    before = (run / "report.html").read_text()
    assert content(before)["runs"][0]["state"] == "running"
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_report([run], run / "report.html", running=False)
    assert (run / "report.html").read_text() == before
    assert not list(run.glob(".report*"))


def test_a_run_with_much_to_read_keeps_the_former_page_until_it_has(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", 4000)  # several pieces
    monkeypatch.setattr("fasttrain.tools.report.page.PATIENCE", 0)
    calls = 0
    while not (run / "report.html").exists():
        write_report([run], run / "report.html", running=True)
        calls += 1
    assert calls > 1
    assert content((run / "report.html").read_text())["runs"][0]["step"] == 4000


def call(*words: object) -> int:
    try:
        return report.main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = make_run(tmp_path / "a", 20), make_run(tmp_path / "b", 20)
    assert call(a) == 0
    assert (a / "report.html").exists()
    assert call(a, b) == 0
    assert (tmp_path / "report.html").exists()
    assert call(a, "--out", "x.html") == 0
    assert content((tmp_path / "x.html").read_text())["runs"][0]["checkpoints"][0]["state"] == "committed"
    assert "x.html" in capsys.readouterr().out
    assert call(tmp_path / "none") == 2
    assert "fasttrain report: error:" in capsys.readouterr().err


def test_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / name, 30, events=[event_line(9, "spike", "up")]) for name in "ab"]
    assert call(*runs, "--out", tmp_path / "x.html", "--png", tmp_path / "x.png") == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert call(runs[0], "--png", tmp_path / "pictures") == 0
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert {"loss.png", "lr.png", "grad_norm.png", "tokens_per_second.png", "mfu.png", "step_time.png"} <= names
    assert call(runs[0], "--png", tmp_path / "x.gif") == 2
    assert "a picture is .png or .svg" in capsys.readouterr().err


def line(step: int, **more: object) -> dict:
    return dict(step=step, time=float(step), **more)


def test_the_newest_answer_to_each_question_stays_text(tmp_path):
    run = make_run(tmp_path / "run", 10)
    score = dict(set=NASTY, loss=2.5, tokens=64, suspicion=NASTY)
    task = dict(task="mine", metric="acc", filter="none", value=0.5, stderr=None, samples=4, fewshot=0)
    lines = [line(9, **score), line(9, **task), line(6, **score), line(9, **score | dict(loss=3.5))]
    write_lines(run / "evaluations.jsonl", [*lines, line(9, **score | dict(tokens=128))])
    (shown,) = content(page(read_records([run])))["runs"]
    found = [(each["step"], each.get("set"), each.get("loss"), each.get("tokens")) for each in shown["evaluations"]]
    assert found == [(6, NASTY, 2.5, 64), (9, NASTY, 3.5, 64), (9, None, None, None), (9, NASTY, 2.5, 128)]


def test_a_run_that_nobody_asked_about(tmp_path):
    (shown,) = content(page(read_records([make_run(tmp_path / "run", 10)])))["runs"]
    assert shown["evaluations"] == []
